// Parallel coordinates: an axis for each swept key and one for the best value; a run is a line across them.

const MOST_AXES = 8

function axesOf(some) {
  const able = some.filter((run) => run.monitor === data.monitor && Number.isFinite(best(run)))
  const found = data.swept.slice(0, MOST_AXES - 1).map((key) => ({title: key, ...text(key)}))
  found.push({title: `best ${data.monitor}`, value: best, isNumber: true, isResult: true})
  return {able, axes: found.map((axis) => scaled(axis, able)).filter((axis) => axis.marks.length)}
}

// Give an axis its `at(run)`, from 0 to 1, and its marks: numbers evenly or, over more than two powers of ten, by their logarithm.
function scaled(axis, some) {
  const values = [...new Set(some.map(axis.value))]
  const finite = values.filter(Number.isFinite)
  if (!axis.isNumber || finite.length < values.length) {
    const names = [...new Set(some.map((run) => String(axis.text ? axis.text(run) : axis.value(run))))].sort()
    const height = (name) => (names.length < 2 ? 0.5 : names.indexOf(name) / (names.length - 1))
    return {...axis, at: (run) => height(String(axis.text ? axis.text(run) : axis.value(run))), marks: names.slice(0, 40).map((name) => [name, height(name)])}
  }
  const low = least(finite), high = largest(finite), isLog = low > 0 && high / low > 100
  const way = isLog ? Math.log10 : (value) => value
  const height = (value) => (high > low ? (way(value) - way(low)) / (way(high) - way(low)) : 0.5)
  const shown = !axis.isResult && finite.length <= 8 ? finite : isLog ? logTicks(way(low), way(high), 5).map((power) => 10 ** power) : ticks(low, high, 5)
  return {...axis, at: (run) => height(axis.value(run)), marks: shown.map((value) => [compact(value), height(value)])}
}

function mixed(from, to, part) {
  const channel = (color, index) => parseInt(color.slice(1 + 2 * index, 3 + 2 * index), 16)
  return `rgb(${[0, 1, 2].map((index) => Math.round(channel(from, index) + part * (channel(to, index) - channel(from, index)))).join(",")})`
}

function drawParallel(some) {
  const {able, axes} = axesOf(some), panel = id("parallel")
  panel.hidden = able.length < 2 || axes.length < 2
  if (panel.hidden) return
  const {context, width, height} = cleared(panel.querySelector("canvas"))
  const left = 50, right = 110, top = 24, bottom = 12, tall = height - top - bottom
  const across = (index) => left + (index * (width - left - right)) / (axes.length - 1)
  const picked = chosen(), marked = bestOf(able), goal = axes[axes.length - 1]
  const order = able.map((run) => [picked.length ? picked.includes(run) : run === marked, run]).sort(([one], [other]) => one - other)
  for (const [isBright, run] of order) {
    context.strokeStyle = mixed(css("--low"), css("--high"), goal.at(run))
    context.globalAlpha = isBright ? 1 : picked.length ? 0.12 : Math.max(0.12, Math.min(0.7, 60 / able.length))
    context.lineWidth = isBright ? 3 : 1.2
    context.beginPath()
    axes.forEach((axis, index) => context[index ? "lineTo" : "moveTo"](across(index), top + (1 - axis.at(run)) * tall))
    context.stroke()
  }
  context.globalAlpha = 1
  axes.forEach((axis, index) => {
    const x = across(index), space = (width - left - right) / (axes.length - 1)
    context.fillStyle = css("--line")
    context.fillRect(x, top, 1, tall)
    context.textBaseline = "middle"
    context.fillStyle = css("--text")
    context.textAlign = index === 0 ? "left" : index === axes.length - 1 ? "right" : "center"
    const anchor = index === 0 ? 4 : index === axes.length - 1 ? width - 4 : x
    context.fillText(fitted(context, axis.title, space - 12), anchor, 9)
    context.textAlign = "left"
    let above = Infinity
    for (const [name, at] of axis.marks.sort(([, one], [, other]) => one - other)) {
      if (above - (top + (1 - at) * tall) < 14) continue // it would lie over the mark before
      above = top + (1 - at) * tall
      const label = fitted(context, name, index === axes.length - 1 ? right - 10 : space - 14), y = top + (1 - at) * tall
      context.globalAlpha = 0.75
      context.fillStyle = css("--back")
      context.fillRect(x + 4, y - 7, context.measureText(label).width + 4, 14)
      context.globalAlpha = 1
      context.fillStyle = css("--quiet")
      context.fillText(label, x + 6, y)
    }
  })
}

// A text, cut so that it is no wider than some pixels: of a key its end says more.
function fitted(context, name, most) {
  let cut = name
  while (cut.length > 3 && context.measureText(cut).width > most) cut = `…${cut.slice(cut.startsWith("…") ? 2 : 1)}`
  return cut
}
