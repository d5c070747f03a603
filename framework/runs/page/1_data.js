// What the page holds: the runs of the JSON beside this script, how their values are read and written, and the state of the page.

const data = JSON.parse(document.getElementById("data").textContent)
const runs = data.runs
const MOST_COLORED = 10
const byLabel = new Map(runs.map((run) => [run.label, run]))
const id = (name) => document.getElementById(name)

function element(tag, text = "", properties = {}) {
  const made = Object.assign(document.createElement(tag), properties)
  if (text) made.textContent = text // never as HTML: names and values are from files of anybody
  return made
}

function numbers(text, Type) {
  return new Type(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer)
}

// A value that a file names: Object's own properties (`constructor`) are not among them.
const at = (table, name, otherwise) => (Object.hasOwn(table, name) ? table[name] : otherwise)

// Steps and values of a run's curve, decoded when they are first drawn.
function curve(run, name) {
  const found = at(run.curves, name)
  if (!found) return null
  if (typeof found[1] === "string") run.curves[name] = [data.grids[found[0]], numbers(found[1], Float32Array)]
  return run.curves[name]
}

function interpolated(xs, ys, x) {
  let low = 0, high = xs.length - 1
  if (high < 0) return NaN
  if (x >= xs[high]) return ys[high]
  if (x <= xs[0]) return x === xs[0] ? ys[0] : ys[0] * (x / xs[0])
  while (high - low > 1) {
    const middle = (low + high) >> 1
    if (xs[middle] <= x) low = middle
    else high = middle
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low])
}

// Where a step of a run is on the x axis.
function placed(run, step) {
  if (ui.x === "step") return step
  if (ui.x === "samples") return step * (run.batch ?? (Number(setting(run, "global_batch_size")) || NaN))
  if (run.clock && typeof run.clock[1] === "string") run.clock = [data.grids[run.clock[0]], numbers(run.clock[1], Float32Array)]
  return run.clock ? interpolated(run.clock[0], run.clock[1], step) : NaN
}

const setting = (run, key) => at(run.own, key, at(data.common, key, ""))
const bestAt = (run, name) => at(run.best, name, []) // value and step
const best = (run) => bestAt(run, run.monitor)[0] ?? NaN

// The best of some runs, among those with the monitor that most runs have.
function bestOf(some) {
  const able = some.filter((run) => run.monitor === data.monitor && Number.isFinite(best(run)))
  return able.reduce((one, other) => (!one || (other.maximised ? best(other) > best(one) : best(other) < best(one)) ? other : one), null)
}

// --- how values are written

function metric(value) {
  if (value === null) return "nan" // JSON has no word for it
  if (!Number.isFinite(value)) return ""
  const size = Math.abs(value)
  return size >= 1e5 || (value !== 0 && size < 1e-3) ? value.toExponential(2) : value.toFixed(4)
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return ""
  const parts = [seconds / 3600, (seconds / 60) % 60, seconds % 60].map(Math.floor)
  return parts.map((part, index) => (index ? String(part).padStart(2, "0") : part)).join(":")
}

const MOST_LETTERS = 40, BEFORE = 12 // of a text that is not cut; and before the first letter that is not the same
const counted = new Map() // key -> its sameLetters

// A setting; of a number with many digits the first six, of a long text what differs between the runs: the whole is under the mouse.
function brief(run, key) {
  const value = setting(run, key)
  if (value.length > 9 && value.includes(".") && Number.isFinite(Number(value))) return String(Number(Number(value).toPrecision(6)))
  return value.length > MOST_LETTERS && sameLetters(key) > BEFORE ? `… ${value.slice(sameLetters(key) - BEFORE)}` : value
}

// With how many letters all values of a key begin; 0 if there is only one value.
function sameLetters(key) {
  if (!counted.has(key)) {
    const [first, ...others] = new Set(runs.map((run) => setting(run, key)).filter(Boolean))
    let letters = 0
    while (others.length && letters < first.length && others.every((other) => other[letters] === first[letters])) letters += 1
    counted.set(key, letters)
  }
  return counted.get(key)
}
const count = (value) => (Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "")
const share = (value) => (Number.isFinite(value) ? `${Math.round(100 * value)} %` : "")

// --- the state of the page, which is in its address: a page that is loaded again looks the same

const isMaximised = runs.some((run) => run.monitor === data.monitor && run.maximised)
const DEFAULTS = {filter: "", x: "step", log: false, smooth: 0, group: "", shown: {}, sort: [`best ${data.monitor}`, isMaximised ? -1 : 1], chosen: [], zoom: null}
const ui = {...DEFAULTS, ...stated()}

function stated() {
  try {
    const found = JSON.parse(decodeURIComponent(location.hash.slice(1)))
    return Object.fromEntries(Object.entries(found).filter(([key, value]) =>
      key === "zoom" ? Array.isArray(value) : typeof value === typeof DEFAULTS[key] && Array.isArray(value) === Array.isArray(DEFAULTS[key])))
  } catch {
    return {} // no state, or not one of ours
  }
}

function remember() {
  const changed = Object.entries(ui).filter(([key, value]) => JSON.stringify(value) !== JSON.stringify(DEFAULTS[key]))
  const hash = changed.length ? encodeURIComponent(JSON.stringify(Object.fromEntries(changed))) : ""
  if (location.hash.slice(1) !== hash) location.replace(`#${hash}`)
}

const chosen = () => ui.chosen.map((label) => byLabel.get(label)).filter(Boolean)
