// The panel of the chosen runs: what one run is and said, or in what two runs differ.

function tableOf(head, rows) {
  const table = element("table"), body = element("tbody")
  if (head.length) {
    const top = element("thead"), line = element("tr")
    line.append(...head.map((title) => element("th", title, {title})))
    top.append(line)
    table.append(top)
  }
  for (const cells of rows) {
    const line = element("tr")
    line.append(...cells.map((cell) => element("td", String(cell ?? ""))))
    body.append(line)
  }
  table.append(body)
  return table
}

function part(title, head, rows) {
  return rows.length ? [element("h2", title), tableOf(head, rows)] : []
}

function drawChosen() {
  const picked = chosen(), panel = id("chosen")
  panel.hidden = picked.length === 0 || picked.length > 2
  if (panel.hidden) return panel.replaceChildren()
  panel.replaceChildren(...(picked.length === 1 ? detailsOf(picked[0]) : differenceOf(...picked)))
}

const origin = (run) => data.origins[run.origin] ?? {}

function detailsOf(run) {
  const {packages = {}, code = {}, ...facts} = origin(run)
  const copy = element("button", "copy the path", {type: "button"})
  copy.onclick = () => navigator.clipboard?.writeText(run.label).then(() => (copy.textContent = "copied"))
  const own = Object.entries(run.own).map(([key, value]) => [key, value, data.execution.includes(key) ? "execution" : ""])
  const all = element("details")
  all.append(element("summary", "keys with the same value in all runs"), tableOf([], Object.entries(data.common)))
  const samples = Object.entries(run.predictions).flatMap(([split, rows]) => {
    const names = [...new Set(rows.flatMap(Object.keys))]
    const made = part(`predictions of ${split}: the first ${rows.length}`, names, rows.map((row) => names.map((name) => (typeof at(row, name) === "number" ? compact(row[name]) : at(row, name)))))
    if (Object.hasOwn(run.pictures, split)) made.splice(1, 0, element("img", "", {className: "samples", src: `data:image/png;base64,${run.pictures[split]}`, alt: `these samples of ${split}, in their order`}))
    return made
  })
  const metrics = Object.keys(run.last).filter((name) => !name.endsWith("/samples_per_s")).map((name) => [name, metric(bestAt(run, name)[0]), bestAt(run, name)[1], metric(run.last[name])])
  const about = [["state", run.state], ["error", run.note], ...Object.entries(facts), ["packages", Object.entries(packages).map((pair) => pair.join(" ")).join(", ")]]
  return [element("h2", run.label), copy, tableOf([], about.filter(([, value]) => value)), ...part("metrics", ["", "best", "at step", "last"], metrics), ...samples,
    ...part("configuration", [], own), all]
}

// --- two runs

function differing(one, other) {
  const keys = [...new Set([...Object.keys(one), ...Object.keys(other)])]
  return keys.map((key) => [key, at(one, key, "(none)"), at(other, key, "(none)")]).filter(([, first, second]) => first !== second)
}

function differenceOf(one, other) {
  const head = ["", short(one), short(other)], keys = differing(one.own, other.own), first = origin(one), second = origin(other)
  const {packages: packagesOne = {}, code: codeOne = {}, ...factsOne} = first
  const {packages: packagesOther = {}, code: codeOther = {}, ...factsOther} = second
  const code = differing(codeOne, codeOther).map(([name, from, to]) => [name, from.slice(0, 8), to.slice(0, 8)])
  const parts = [
    ...part("configuration", head, keys.filter(([key]) => !data.execution.includes(key))),
    ...part("execution (does not change the results)", head, keys.filter(([key]) => data.execution.includes(key))),
    ...part("code: modules that differ", head, code),
    ...part("packages", head, differing(packagesOne, packagesOther)),
    ...part("start", head, differing(factsOne, factsOther)),
    ...part("best and last", head, [...new Set([one.monitor, other.monitor, ...data.tests])].map((name) => [name, ...[one, other].map((run) =>
      `${metric(bestAt(run, name)[0])} @${bestAt(run, name)[1] ?? ""}; last ${metric(at(run.last, name))}`)])),
  ]
  const recorded = one.origin !== null && other.origin !== null
  const same = [...(keys.length ? [] : ["configuration"]), ...(code.length || !recorded ? [] : ["code"])]
  return [element("h2", `${short(one)} and ${short(other)}`), element("p", `${firstDifference(one, other)}${same.length ? ` Equal: ${same.join(", ")}.` : ""}${
    recorded ? "" : " One run has no record of its code."}`), ...parts]
}

// Marks are chained hashes of all rows so far, without the clock's values: at rows 1 * stride, 2 * stride, ..., and at the last row.
function marksOf(run) {
  const {stride, rows, grid, hashes} = run.marks, values = numbers(hashes, Uint32Array)
  return new Map([...values].map((hash, index) => [Math.min((index + 1) * stride, rows), [hash, data.grids[grid][index]]]))
}

function firstDifference(one, other) {
  if (!one.marks.rows || !other.marks.rows) return "One run has no rows."
  const marks = marksOf(one), others = marksOf(other)
  const common = [...marks.keys()].filter((row) => others.has(row)).sort((a, b) => a - b)
  const differs = common.findIndex((row) => marks.get(row)[0] !== others.get(row)[0])
  const before = common[(differs < 0 ? common.length : differs) - 1], equal = before ? marks.get(before)[1] : null
  if (differs < 0 && one.marks.rows === other.marks.rows) return `Their ${one.marks.rows} rows are equal to the last bit.`
  const shorter = Math.min(one.marks.rows, other.marks.rows)
  if (differs < 0) return `Their rows are equal to the last bit up to step ${equal ?? 0}; ${before === shorter ? "one run has more rows" : "the page does not have later rows"}.`
  const [first, second] = [marks.get(common[differs])[1], others.get(common[differs])[1]], at = Math.min(first, second)
  const isExact = common[differs] === (before ?? 0) + 1
  return isExact ? `Their rows differ first at step ${at}.` : `Their rows differ first at or before step ${at}${before ? `, after step ${equal}` : ""}.`
}
