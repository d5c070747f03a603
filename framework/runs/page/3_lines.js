// What is drawn: the curves of runs, or of groups of runs, smoothed, with their colors.

const MOST_FAINT = 200 // more curves in a panel are not to be told apart, and take seconds
const GROUP_POINTS = 300

// Exponential moving average with its bias removed (as Adam's: Kingma and Ba 2015); values that are not known are passed over.
function smoothed(ys, weight) {
  if (!weight) return ys
  let mean = 0, bias = 1
  return Float32Array.from(ys, (y) => {
    if (!Number.isFinite(y)) return NaN
    mean = weight * mean + (1 - weight) * y
    bias *= weight
    return mean / (1 - bias)
  })
}

// The groups of runs: by the value of one key, or runs that differ in nothing but their seed.
function groupsOf(some) {
  const keys = ui.group === "seed" ? data.computed.filter((key) => key !== "seed") : [ui.group.slice(4)]
  const groups = new Map()
  for (const run of some) {
    const values = keys.map((key) => setting(run, key)), name = JSON.stringify(values)
    if (!groups.has(name)) groups.set(name, {key: name, runs: [], title: keys.filter((key) => data.swept.includes(key) || ui.group !== "seed")
      .map((key) => `${key.split(".").pop()}=${brief(run, key)}`).join(" ") || "all runs"})
    groups.get(name).runs.push(run)
  }
  return [...groups.values()]
}

// The mean of a group's curves and their least and largest value, at equally many points of the longest run.
function meanOf(group, name) {
  const found = group.runs.map((run) => lineOf(run, name)).filter(Boolean)
  if (!found.length) return null
  const longest = found.reduce((one, other) => (other.xs[other.xs.length - 1] > one.xs[one.xs.length - 1] ? other : one))
  const every = Math.ceil(longest.xs.length / GROUP_POINTS)
  const xs = Array.from(longest.xs).filter((_, index) => (longest.xs.length - 1 - index) % every === 0)
  const means = [], lows = [], highs = []
  for (const x of xs) {
    const values = found.filter((line) => x >= line.xs[0] && x <= line.xs[line.xs.length - 1]).map((line) => interpolated(line.xs, line.ys, x))
    means.push(mean(values))
    lows.push(least(values))
    highs.push(largest(values))
  }
  return {xs, ys: means, lows, highs, raw: null}
}

function lineOf(run, name) {
  const found = curve(run, name)
  if (!found) return null
  const xs = ui.x === "step" ? found[0] : found[0].map((step) => placed(run, step))
  return Number.isFinite(xs[0]) ? {xs, ys: smoothed(found[1], ui.smooth), raw: ui.smooth ? found[1] : null} : null
}

// --- which are colored: the chosen ones, or else the first of the table; a color stays with its run or group

const slots = new Map() // the key of what is colored -> the number of its color

function colored(keys) {
  for (const key of slots.keys()) if (!keys.includes(key)) slots.delete(key)
  for (const key of keys) {
    const taken = new Set(slots.values())
    if (!slots.has(key)) slots.set(key, [...Array(MOST_COLORED).keys()].find((slot) => !taken.has(slot)))
  }
  const style = getComputedStyle(document.documentElement)
  return new Map(keys.map((key) => [key, style.getPropertyValue(`--c${slots.get(key)}`).trim()]))
}

const spread = (values) => (values.length ? `, best ${data.monitor} ${metric(mean(values))} (${metric(least(values))}..${metric(largest(values))})` : "")
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length

// What the panels and the legend show of the visible runs: entries with a color, and some without.
function entriesOf(some) {
  const picked = chosen().filter((run) => some.includes(run))
  const all = ui.group ? groupsOf(some) : some.map((run) => ({key: run.label, runs: [run], run, title: short(run)}))
  const groups = all.filter((group) => group.runs.some((run) => Object.keys(run.curves).length))
  const wanted = picked.length ? groups.filter((group) => group.runs.some((run) => picked.includes(run))) : groups
  const bright = wanted.slice(0, MOST_COLORED), colors = colored(bright.map((group) => group.key))
  const telling = data.swept.filter((key) => bright.length < 2 || new Set(bright.map((group) => setting(group.runs[0], key))).size > 1)
  for (const group of bright) {
    group.color = colors.get(group.key)
    const values = group.runs.filter((run) => run.monitor === data.monitor).map(best).filter(Number.isFinite)
    const settings = telling.map((key) => `${key.split(".").pop()}=${brief(group.runs[0], key)}`).join(" ")
    group.detail = group.run ? settings : `${group.runs.length} run${group.runs.length === 1 ? "" : "s"}${spread(values)}`
  }
  return {groups, bright, faint: groups.filter((group) => !group.color).slice(0, MOST_FAINT)}
}

function drawLegend({groups, bright, faint}) {
  const made = bright.map((group) => {
    const entry = element("span", "", {className: "entry"}), swatch = element("span", "", {className: "swatch"})
    swatch.style.background = group.color
    entry.append(swatch, element("span", group.title), element("span", group.detail ? `\u2002${group.detail}` : ""))
    return entry
  })
  const notes = []
  const noun = ui.group ? "groups" : "runs"
  if (groups.length > bright.length) notes.push(`in color: ${bright.length} of ${groups.length} ${noun} (${ui.chosen.length ? "the chosen" : "the first in the table"})`)
  if (bright.length + faint.length < groups.length) notes.push(`${groups.length - bright.length - faint.length} more are not drawn`)
  if (ui.group) notes.push("line: mean; band: smallest to largest of the group")
  if (ui.x === "samples") notes.push("samples: step × mean batch size")
  id("legend").replaceChildren(...made, ...(notes.length ? [element("span", notes.join("; "))] : []))
}

// The lines of one panel: faint ones first, so that the colored ones lie above.
function linesOf({bright, faint}, name) {
  return [...faint, ...[...bright].reverse()].flatMap((group) => {
    const line = group.run ? lineOf(group.run, name) : meanOf(group, name)
    return line ? [{...line, group, color: group.color}] : []
  })
}
