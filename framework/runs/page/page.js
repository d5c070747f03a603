"use strict"
// The page: a table of the runs, and for each metric a chart of uPlot. All that is chosen is in `ui`, which the page's address keeps.

// Objects without a prototype: a file may name anything, also `constructor`. Texts are never shown as HTML, for the same reason.
const bare = (key, value) => (value && typeof value === "object" && !Array.isArray(value) ? Object.assign(Object.create(null), value) : value)
const data = JSON.parse(document.getElementById("data").textContent, bare)
const runs = data.runs
const COLORS = ["#1f77b4", "#e36b00", "#2a8f2a", "#d62728", "#8250c4", "#8c564b", "#d64fa8", "#0d9aa8", "#96930f", "#7f8c95"]
const GRAY = "#9aa5ad66"
const FIRST_ROWS = 200 // the others follow after the first frame
const MOST_GRAY = 100 // more curves in a chart cannot be distinguished
const DEFAULTS = {filter: "", all: false, group: "", x: "step", logx: false, logy: false, smooth: 0, sort: [`best ${data.monitor}`, 0], chosen: []}
const ui = {...DEFAULTS, ...stated()}
const id = (name) => document.getElementById(name)

function element(tag, text = "", properties = {}) {
  const made = Object.assign(document.createElement(tag), properties)
  if (text) made.textContent = text
  return made
}

function stated() {
  try {
    const found = Object.entries(JSON.parse(decodeURIComponent(location.hash.slice(1))))
    return Object.fromEntries(found.filter(([key, value]) => typeof value === typeof DEFAULTS[key] && Array.isArray(value) === Array.isArray(DEFAULTS[key])))
  } catch {
    return {} // no state, or not one of ours
  }
}

function change(changes) {
  Object.assign(ui, changes)
  location.replace(`#${encodeURIComponent(JSON.stringify(ui))}`)
  draw()
}

// --- the table

const setting = (run, key) => run.own[key] ?? data.common[key] ?? ""
const best = (run) => run.best[run.monitor]?.[0]
const duration = (seconds) => (seconds === undefined ? "" : new Date(1000 * seconds % 864e5).toISOString().slice(11, 19).replace(/^\d+/, Math.floor(seconds / 3600)))

function metric(value) {
  if (value === null) return "nan" // JSON has no word for it
  if (value === undefined) return ""
  return value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) ? value.toExponential(2) : value.toFixed(4)
}

function columnsOf() {
  const column = (title, value, text = value) => ({title, value, text})
  const bestOf = (name) => column(`best ${name}`, (run) => run.best[name]?.[0], (run) => (run.best[name] ? `${metric(run.best[name][0])} @${run.best[name][1]}` : ""))
  const lastOf = (name) => column(name.startsWith("test/") ? name : `last ${name}`, (run) => run.last[name], (run) => metric(run.last[name]))
  const [final, ...others] = [`test/${data.monitor.split("/")[1]}`, data.monitor, ...data.tests, ...data.panels].filter((name, index) =>
    index || data.tests.includes(name))
  const monitors = [...new Set([data.monitor, ...runs.map((run) => run.monitor)])]
  const main = [column("state", (run) => run.state), ...monitors.map(bestOf), lastOf(final), column("time", (run) => run.numbers.wall_s, (run) => duration(run.numbers.wall_s)),
    ...data.swept.map((key) => column(key, (run) => setting(run, key)))]
  const more = [...data.panels.filter((name) => !monitors.includes(name)).map(bestOf), ...[...new Set(others)].filter((name) => name !== final).map(lastOf),
    ...["step", "goodput", "restarts"].map((name) => column(name, (run) => run.numbers[name])),
    column("samples/s", (run) => run.last["train/samples_per_s"], (run) => metric(run.last["train/samples_per_s"])),
    ...data.execution.map((key) => column(key, (run) => setting(run, key)))]
  return [...main, ...(ui.all ? more : [])]
}

function compared(one, other) {
  const [a, b] = [one, other].map((value) => value ?? "")
  if (a === "" || b === "") return 0 // missing values come last, whatever the direction
  return Number.isNaN(Number(a)) || Number.isNaN(Number(b)) ? String(a).localeCompare(String(b), "en", {numeric: true}) : a - b
}

function visible(columns) {
  const asked = ui.filter.toLowerCase().split(/\s+/).filter(Boolean)
  const words = (run) => [run.label, run.state, run.note, ...[run.own, data.common].flatMap((some) => Object.entries(some).map((pair) => pair.join("=")))].join(" ").toLowerCase()
  const kept = asked.length ? runs.filter((run) => asked.every((word) => words(run).includes(word))) : runs
  const [title, direction] = ui.sort, value = columns.find((column) => column.title === title)?.value ?? ((run) => run.label)
  const way = direction || (runs.some((run) => run.maximised && run.monitor === data.monitor) ? -1 : 1)
  const isMissing = (run) => (value(run) ?? "") === ""
  return [...kept].sort((one, other) => isMissing(one) - isMissing(other) || way * compared(value(one), value(other)))
}

const parents = runs.map((run) => run.label.split("/").slice(0, -1))
const numShared = parents[0].findIndex((name, index) => parents.some((other) => other[index] !== name))
const short = (run) => run.label.split("/").slice(numShared < 0 ? parents[0].length : numShared).join("/")

let others

function drawTable(some, columns, colors) {
  const heads = [{title: "run"}, ...columns].map(({title}) => element("th", title + (ui.sort[0] === title ? (ui.sort[1] < 0 ? " ▾" : " ▴") : ""), {
    title, onclick: () => change({sort: [title, ui.sort[0] === title && ui.sort[1] === 1 ? -1 : 1]})}))
  const head = element("tr")
  head.append(...heads)
  document.querySelector("thead").replaceChildren(head)
  const rowsOf = (run) => {
    const row = element("tr", "", {className: `run${ui.chosen.includes(run.label) ? " is-chosen" : ""}`, onclick: () => choose(run)})
    const name = element("td", "", {title: run.label}), swatch = element("span", "", {className: "swatch"})
    swatch.style.background = colors.get(run) ?? GRAY
    name.append(swatch, element("span", short(run)))
    row.append(name, ...columns.map((column) => element("td", String(column.text(run) ?? ""), {title: column.text(run) ?? ""})))
    if (!run.note) return [row]
    const note = element("tr", "", {className: "note"})
    note.append(element("td", run.note, {colSpan: columns.length + 1, title: run.note}))
    return [row, note]
  }
  const body = document.querySelector("tbody")
  body.replaceChildren(...some.slice(0, FIRST_ROWS).flatMap(rowsOf))
  clearTimeout(others)
  others = setTimeout(() => body.append(...some.slice(FIRST_ROWS).flatMap(rowsOf)))
}

const choose = (run) => change({chosen: ui.chosen.includes(run.label) ? ui.chosen.filter((label) => label !== run.label) : [...ui.chosen, run.label]})

function drawChosen() {
  const run = ui.chosen.length === 1 ? runs.find((one) => one.label === ui.chosen[0]) : null
  const tableOf = (title, rows) => {
    const table = element("table"), lines = rows.map((cells) => {
      const line = element("tr")
      line.append(...cells.map((cell) => element("td", String(cell ?? ""))))
      return line
    })
    table.append(...lines)
    return rows.length ? [element("h2", title), table] : []
  }
  id("chosen").replaceChildren(...(run ? [
    ...tableOf(run.label, Object.entries({state: run.state, ...run.origin})),
    ...tableOf("metrics: best, at step, last", Object.keys(run.last).map((name) => [name, ...(run.best[name] ? [metric(run.best[name][0]), run.best[name][1]] : ["", ""]), metric(run.last[name])])),
    ...tableOf("configuration", Object.entries({...run.own, ...data.common})),
  ] : []))
}

// --- the curves

// Steps and values of a run's curve on the chosen x axis, smoothed: an exponential moving average without bias (Kingma and Ba 2015).
function curve(run, name) {
  const packed = run.curves[name], {step, samples_seen, train_s} = run.numbers
  const factor = {step: 1, samples: samples_seen / step, time: train_s / step}[ui.x]
  if (!packed || !(factor > 0)) return null
  const values = new Float32Array(Uint8Array.from(atob(packed[1]), (letter) => letter.charCodeAt(0)).buffer)
  let mean = 0, bias = 1
  return [data.grids[packed[0]].map((at) => at * factor), Array.from(values, (value) => {
    mean = ui.smooth * mean + (1 - ui.smooth) * value
    bias *= ui.smooth
    return Number.isFinite(mean) ? mean / (1 - bias) : null
  })]
}

// Runs are drawn alone, or in groups: those with the same value of a key, or those that differ in nothing but their seed.
function groupsOf(some) {
  if (!ui.group) return some.map((run) => ({title: short(run), runs: [run]}))
  const keys = ui.group === "seed" ? data.computed.filter((key) => key !== "seed") : [ui.group], groups = new Map()
  for (const run of some) {
    const name = JSON.stringify(keys.map((key) => setting(run, key)))
    const title = keys.filter((key) => data.swept.includes(key)).map((key) => `${key.split(".").pop()}=${setting(run, key)}`).join(" ") || "all runs"
    groups.set(name, {title, runs: [...(groups.get(name)?.runs ?? []), run]})
  }
  return [...groups.values()]
}

// The mean, least and largest value of a group's curves, at the steps that all of them have (a shorter run: until its end).
function lineOf(group, name) {
  const curves = group.runs.map((run) => curve(run, name)).filter(Boolean)
  if (curves.length < 2) return curves[0] ?? null
  const [xs, ...columns] = uPlot.join(curves), ends = curves.map(([own]) => own.at(-1))
  const rows = xs.map((x, index) => [x, columns.map((ys) => ys[index])]).filter(([x, ys]) => ys.every((y, n) => y !== undefined || x > ends[n]))
    .map(([x, ys]) => [x, ys.filter((y) => y !== undefined)])
  return [rows.map(([x]) => x), rows.map(([, ys]) => ys.reduce((sum, y) => sum + y, 0) / ys.length), rows.map(([, ys]) => Math.min(...ys)), rows.map(([, ys]) => Math.max(...ys))]
}

class Chart {
  constructor(name) {
    Object.assign(this, {name, figure: element("figure"), caption: element("figcaption"), place: element("div"), isSeen: false})
    this.figure.append(this.caption, this.place)
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting
      if (this.isSeen && this.groups) this.draw(this.groups)
    }).observe(this.figure)
  }

  // Draw the groups, gray ones first. A chart that is not on the screen is drawn when it gets there.
  draw(groups) {
    this.groups = groups
    if (!this.isSeen) return
    this.groups = null
    this.lines = [...groups].reverse().map((group) => ({group, line: lineOf(group, this.name)?.slice(0, group.color === GRAY ? 2 : 4)}))
      .filter(({line}) => line?.[0].length)
    const series = [{}], bands = [], tables = this.lines.map(({line}) => (ui.logy ? line.map((ys, n) => (n ? ys.map((y) => (y > 0 ? y : null)) : ys)) : line))
    for (const {group, line} of this.lines) {
      series.push({label: group.title, stroke: group.color, width: group.color === GRAY ? 1 : 2, points: {show: line[0].length === 1}})
      if (line.length < 3 || group.color === GRAY) continue
      bands.push({series: [series.length + 1, series.length], fill: `${group.color}33`})
      series.push({stroke: "transparent", points: {show: false}}, {stroke: "transparent", points: {show: false}})
    }
    const style = getComputedStyle(document.documentElement), axis = {stroke: style.getPropertyValue("--quiet"), grid: {stroke: style.getPropertyValue("--line"), width: 1}}
    this.caption.replaceChildren(element("b", this.name), element("span"))
    this.plot?.destroy()
    this.plot = new uPlot({
      width: this.figure.clientWidth, height: 260, series, bands, legend: {show: false}, axes: [{...axis}, {...axis, size: 64}],
      scales: {x: {time: false, distr: ui.logx ? 3 : 1}, y: {distr: ui.logy ? 3 : 1}},
      cursor: {sync: {key: "charts"}, focus: {prox: 20}, points: {show: false}},
      focus: {alpha: 1},
      hooks: {setSeries: [(plot, index) => index && this.tell(plot, index)]},
    }, tables.length ? uPlot.join(tables) : [[], ...series.slice(1)], this.place)
  }

  tell(plot, index) {
    const at = plot.cursor.idx, value = at === null ? undefined : plot.data[index][at]
    if (plot.series[index].label && value !== undefined) this.caption.lastChild.textContent = `${plot.series[index].label}: ${metric(value)} at ${plot.data[0][at]}`
  }
}

const charts = data.panels.map((name) => new Chart(name))

function draw() {
  const columns = columnsOf(), some = visible(columns), picked = some.filter((run) => ui.chosen.includes(run.label))
  const groups = groupsOf(some), isFirst = (group) => (picked.length ? group.runs.some((run) => picked.includes(run)) : true)
  const bright = groups.filter(isFirst).slice(0, COLORS.length)
  bright.forEach((group, index) => (group.color = COLORS[index]))
  const gray = groups.filter((group) => !group.color).slice(0, MOST_GRAY)
  gray.forEach((group) => (group.color = GRAY))
  drawTable(some, columns, new Map(bright.flatMap((group) => group.runs.map((run) => [run, group.color]))))
  drawChosen()
  for (const chart of charts) chart.draw([...bright, ...gray])
  const states = Object.entries(Object.groupBy(runs, (run) => run.state)).map(([state, found]) => `${found.length} ${state}`).join(" ")
  const able = some.filter((run) => run.monitor === data.monitor && best(run) !== undefined)
  const first = able.reduce((one, run) => (one && (run.maximised ? best(one) >= best(run) : best(one) <= best(run)) ? one : run), null)
  const winner = first ? `; best ${data.monitor} ${metric(best(first))} at step ${first.best[data.monitor][1]}: ${short(first)}` : ""
  id("summary").textContent = `${runs.length} run${runs.length === 1 ? "" : "s"}: ${states}${winner}; written ${new Date(1000 * data.written).toLocaleString()}`
  if (data.every) id("summary").append(element("b", isOld ? " no longer updated" : " live", {id: "live"}))
}

// --- a page of active runs is loaded again, but not while somebody types. A page that stays the same is no longer written.

const before = history.state?.written === data.written ? history.state : {written: data.written, times: 0}
const isOld = before.times > 3 + 10 / data.every
history.replaceState({...before, times: before.times + 1}, "")

function again() {
  if (document.activeElement === id("filter") || document.activeElement === id("smooth") || !getSelection().isCollapsed) setTimeout(again, 500)
  else location.reload()
}

for (const key of data.swept) id("group").append(element("option", key, {value: key}))
for (const name of ["filter", "group", "x", "smooth"]) id(name).value = ui[name]
for (const name of ["all", "logx", "logy"]) id(name).checked = ui[name]
for (const name of ["filter", "group", "x"]) id(name).oninput = () => change({[name]: id(name).value})
for (const name of ["all", "logx", "logy"]) id(name).onchange = () => change({[name]: id(name).checked})
id("smooth").oninput = () => change({smooth: Number(id("smooth").value)})
id("title").textContent = data.title
id("left-out").append(...data.left_out.map((line) => element("div", line)))
id("left-out").hidden = !data.left_out.length
id("curves").append(...charts.map((chart) => chart.figure))
window.onresize = draw
window.matchMedia("(prefers-color-scheme: dark)").onchange = draw
draw()
if (data.every && !isOld) setTimeout(again, 1000 * data.every)
document.documentElement.dataset.drawn = "all"
