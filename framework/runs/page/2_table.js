// The table: a row for each run, the columns that are chosen, sorted and filtered.

const FIRST_ROWS = 200 // more as one scrolls

function text(key) {
  const values = runs.map((run) => setting(run, key))
  const isNumber = values.every((value) => value === "" || value === "null" || Number.isFinite(Number(value)))
  const read = (run) => (["", "null"].includes(setting(run, key)) ? NaN : Number(setting(run, key)))
  return {value: isNumber ? read : (run) => setting(run, key), text: (run) => brief(run, key), whole: (run) => setting(run, key), isNumber}
}

const numeric = (value, written) => ({value, text: (run) => written(value(run)), isNumber: true})

function allColumns() {
  const of = (kind, name, isShown, reading, title = name) => ({id: `${kind} ${name}`, kind, title, isShown, ...reading})
  const found = [of("run", "state", true, {value: (run) => run.state, text: (run) => run.state})]
  const metricName = data.monitor.slice(data.monitor.indexOf("/") + 1)
  const monitors = [...new Set([data.monitor, ...runs.map((run) => run.monitor)])]
  const bests = [...new Set([...monitors, ...data.panels.filter((name) => name.startsWith("val/"))])]
  const final = data.tests.includes(`test/${metricName}`) ? `test/${metricName}` : data.monitor
  const bestColumn = (name) => of("best", name, monitors.includes(name), {...numeric((run) => bestAt(run, name)[0] ?? NaN, metric),
    step: (run) => bestAt(run, name)[1]}, `best ${name}`)
  const lastColumn = (name) => of("final", name, name === final, {...numeric((run) => at(run.last, name) ?? NaN, metric), text: (run) => metric(at(run.last, name))},
    name.startsWith("test/") ? name : `last ${name}`)
  found.push(...bests.filter((name) => monitors.includes(name)).map(bestColumn), lastColumn(final))
  found.push(of("run", "time", true, numeric((run) => run.numbers.wall_s ?? NaN, duration)))
  found.push(...data.swept.map((key, index) => of("configuration", key, index < 12, text(key))))
  found.push(...bests.filter((name) => !monitors.includes(name)).map(bestColumn))
  found.push(...[...data.tests, ...data.panels].filter((name) => name !== final).map(lastColumn))
  found.push(of("run", "step", false, numeric((run) => run.numbers.step ?? NaN, count)))
  found.push(of("run", "samples/s", false, numeric((run) => run.last["train/samples_per_s"] ?? NaN, count)))
  found.push(of("run", "goodput", false, numeric((run) => run.numbers.goodput ?? NaN, share)))
  found.push(of("run", "restarts", false, numeric((run) => run.numbers.restarts ?? NaN, count)))
  found.push(...data.execution.map((key) => of("execution", key, false, text(key))))
  return found
}

const columns = allColumns()
const shownColumns = () => columns.filter((column) => ui.shown[column.id] ?? column.isShown)

// --- which runs, in which order

const words = runs.map((run) => [run.label, run.state, run.note, ...Object.entries(run.own).map(([key, value]) => `${key}=${value}`),
  ...Object.entries(data.common).map(([key, value]) => `${key}=${value}`)].join(" ").toLowerCase())

function visible() {
  const asked = ui.filter.toLowerCase().split(/\s+/).filter(Boolean)
  const kept = runs.filter((_, index) => asked.every((word) => words[index].includes(word)))
  const column = columns.find((one) => one.id === ui.sort[0])
  const value = column ? column.value : (run) => run.label
  const way = ui.sort[1] < 0 ? -1 : 1
  return kept.map((run) => [value(run), run]).sort(([one], [other]) => {
    if (typeof one === "string") return way * one.localeCompare(other, "en", {numeric: true})
    return Number.isNaN(one) || Number.isNaN(other) ? Number.isNaN(one) - Number.isNaN(other) : way * (one - other)
  }).map(([, run]) => run)
}

// A run's name without the folders that all runs are in.
const folders = runs.map((run) => run.label.split("/").slice(0, -1))
const numShared = folders.length ? folders[0].findIndex((name, index) => folders.some((other) => other[index] !== name)) : 0
const shared = numShared < 0 ? folders[0]?.length ?? 0 : numShared
const short = (run) => run.label.split("/").slice(shared).join("/")

// --- drawing

let shownRuns = []

function drawTable(some, colors) {
  shownRuns = some
  const head = element("tr"), marked = bestOf(some)
  head.append(headCell({id: "", title: "run"}), ...shownColumns().map(headCell))
  document.querySelector("#table thead").replaceChildren(head)
  const body = document.querySelector("#table tbody")
  body.replaceChildren()
  addRows(body, FIRST_ROWS, colors, marked)
  id("table").onscroll = () => {
    const left = id("table").scrollHeight - id("table").scrollTop - id("table").clientHeight
    if (left < 400) addRows(body, FIRST_ROWS, colors, marked)
  }
}

function addRows(body, most, colors, marked) {
  const begin = body.querySelectorAll("tr.run").length
  for (const run of shownRuns.slice(begin, begin + most)) body.append(...rowsOf(run, colors, run === marked))
}

function headCell(column) {
  const arrow = ui.sort[0] === column.id ? (ui.sort[1] < 0 ? " ▾" : " ▴") : ""
  const cell = element("th", column.title, {title: column.title, className: column.isNumber ? "number" : ""})
  if (arrow) cell.append(element("small", arrow))
  cell.dataset.column = column.id
  cell.onclick = () => change({sort: [column.id, ui.sort[0] === column.id ? -ui.sort[1] : 1]})
  return cell
}

function rowsOf(run, colors, isBest) {
  const row = element("tr", "", {className: `run${ui.chosen.includes(run.label) ? " is-chosen" : ""}${run.note ? " has-note" : ""}`})
  const name = element("td", "", {className: "run", title: run.label})
  const box = element("input", "", {type: "checkbox", checked: ui.chosen.includes(run.label), title: "add this run to the chosen runs"})
  box.onclick = (event) => (event.stopPropagation(), choose([run], true))
  const swatch = element("span", "", {className: "swatch"})
  if (colors.has(run)) swatch.style.background = colors.get(run)
  name.append(box, swatch, element("span", short(run)))
  row.append(name, ...shownColumns().map((column) => cellOf(column, run, isBest)))
  row.onclick = (event) => choose([run], event.ctrlKey || event.metaKey)
  if (!run.note) return [row]
  const note = element("tr", "", {className: "note"}), cell = element("td", "", {colSpan: shownColumns().length + 1})
  cell.append(element("span", run.note))
  note.append(cell)
  return [row, note]
}

function cellOf(column, run, isBest) {
  const written = column.text(run), cell = element("td", "", {className: column.isNumber ? "number" : "", title: column.whole?.(run) ?? written})
  const isMark = isBest && column.id === `best ${data.monitor}`
  const value = element("span", isMark ? `★ ${written}` : written, {className: isMark ? "best" : ""})
  if (column.id === "run state") value.className = `state ${["finished", "running", "failed", "killed", "preempted"].find((state) => state === written) ?? ""}`
  cell.append(value)
  if (column.step && written) cell.append(element("small", ` @${column.step(run)}`))
  return cell
}

function drawColumnList() {
  const kinds = {run: "run", best: "best values", final: "last values", configuration: "configuration", execution: "execution: does not change the results"}
  id("column-list").replaceChildren(...Object.entries(kinds).flatMap(([kind, title]) => {
    const some = columns.filter((column) => column.kind === kind)
    return some.length ? [element("h2", title), ...some.map((column) => {
      const label = element("label"), box = element("input", "", {type: "checkbox", checked: ui.shown[column.id] ?? column.isShown})
      box.onchange = () => change({shown: {...ui.shown, [column.id]: box.checked}})
      label.append(box, ` ${column.title}`)
      const line = element("div")
      line.append(label)
      return line
    })] : []
  }))
}
