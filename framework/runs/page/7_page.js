// The page: one way from its state to what is seen, and what changes the state.

const charts = data.panels.map((name) => new Chart(name))
let entries

function draw() {
  const some = visible()
  entries = entriesOf(some)
  const colors = new Map(entries.bright.flatMap((group) => group.runs.map((run) => [run, group.color])))
  const before = id("table").scrollTop
  drawTable(some, colors)
  id("table").scrollTop = before
  drawSummary(some)
  drawColumnList()
  drawChosen()
  drawCurves()
  drawParallel(some)
  for (const name of ["filter", "x", "group"]) if (id(name).value !== ui[name]) id(name).value = ui[name]
  id("log").checked = ui.log
  id("smooth").value = ui.smooth
  id("smoothness").textContent = ui.smooth ? Number(ui.smooth).toFixed(2) : ""
  id("clear").hidden = !ui.chosen.length
}

function drawCurves() {
  drawLegend(entries)
  for (const chart of charts) chart.draw(linesOf(entries, chart.name))
}

function change(changes) {
  Object.assign(ui, changes)
  remember()
  draw()
}

// Choose runs: instead of the chosen ones, or besides them. Chosen runs that are chosen again are so no more.
function choose(some, isMore) {
  const labels = some.map((run) => run.label), isChosen = labels.every((label) => ui.chosen.includes(label))
  const kept = isMore ? ui.chosen.filter((label) => !labels.includes(label)) : []
  const isUndone = isChosen && (isMore || ui.chosen.length === labels.length)
  change({chosen: isUndone ? kept : [...kept, ...labels]})
}

function drawSummary(some) {
  const states = new Map()
  for (const run of runs) states.set(run.state, (states.get(run.state) ?? 0) + 1)
  const made = [`${runs.length} run${runs.length === 1 ? "" : "s"}: `]
  for (const [state, number] of [...states].sort(([, one], [, other]) => other - one)) {
    const button = element("button", `${number} ${state}`, {type: "button", className: "plain"})
    button.onclick = () => change({filter: ui.filter === state ? "" : state})
    made.push(button, "  ")
  }
  const marked = bestOf(some)
  if (marked) {
    const button = element("button", short(marked), {type: "button", className: "plain"})
    button.onclick = () => choose([marked], false)
    made.push("· best ", element("span", `${data.monitor} ${metric(best(marked))}`, {className: "best"}), ` at step ${bestAt(marked, marked.monitor)[1]}: `, button)
  }
  if (some.length < runs.length) made.push(` · ${some.length} shown`)
  made.push(` · written ${when(data.written)} `)
  if (data.every) made.push(element("span", isOld() ? "no longer updated" : "live", {id: "live"}))
  id("summary").replaceChildren(...made)
}

function when(seconds) {
  const date = new Date(1000 * seconds), two = (number) => String(number).padStart(2, "0")
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`
}

// --- a page of runs that go on is loaded again; not while somebody types, drags or has a list open

// By this machine's clock alone, since the page may be from another: when it was loaded, and when what it shows was seen first.
const loaded = Date.now()
const seen = history.state?.written === data.written ? history.state.seen : loaded
const isOld = () => Date.now() - seen > 1000 * (3 * data.every + 10)

function follow() {
  if (isOld()) return draw()
  const isBusy = charts.some((chart) => chart.drag) || ["filter", "smooth", "group", "x"].some((name) => document.activeElement === id(name)) || id("columns").open || !getSelection().isCollapsed
  if (!isBusy && Date.now() - loaded > 1000 * data.every) {
    history.replaceState({top: id("table").scrollTop, written: data.written, seen}, "")
    location.reload()
  } else setTimeout(follow, 500)
}

// --- the tools

for (const [value, title] of [["", "nothing"], ["seed", "all but the seed"], ...data.swept.map((key) => [`key:${key}`, key])]) id("group").append(element("option", title, {value}))
if (ui.group && ![...id("group").options].some((option) => option.value === ui.group)) ui.group = ""
if (!["step", "samples", "time"].includes(ui.x)) ui.x = "step"
id("title").textContent = data.title
id("filter").oninput = () => change({filter: id("filter").value})
id("x").onchange = () => change({x: id("x").value, zoom: null})
id("group").onchange = () => change({group: id("group").value})
id("log").onchange = () => change({log: id("log").checked})
id("smooth").oninput = () => {
  ui.smooth = Number(id("smooth").value)
  id("smoothness").textContent = ui.smooth ? ui.smooth.toFixed(2) : ""
  drawCurves()
}
id("smooth").onchange = remember
id("clear").onclick = () => change({chosen: []})
id("left-out").append(...data.left_out.map((line) => element("div", line)))
id("left-out").hidden = !data.left_out.length
id("curves").append(...charts.map((chart) => chart.figure))
document.addEventListener("click", (event) => {
  if (!id("columns").contains(event.target)) id("columns").open = false
})
window.matchMedia("(prefers-color-scheme: dark)").onchange = draw
window.onresize = draw
window.onhashchange = () => {
  const found = JSON.stringify({...DEFAULTS, ...stated()})
  if (found !== JSON.stringify(ui)) change(JSON.parse(found))
}
draw()
id("table").scrollTop = history.state?.top ?? 0
if (data.every) setTimeout(follow, 500)
document.documentElement.dataset.drawn = "all"
window.report = {charts, ui, axesOf, runs: visible} // for whoever looks into the page
