// A panel: lines over an x axis on a canvas. Drag to zoom all panels, double click to zoom out, click to choose a run.

const MARGIN = {left: 58, right: 10, top: 8, bottom: 24}

// Round numbers between two values, about `most` of them.
function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough))
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power
  const first = Math.ceil(low / step), last = Math.floor(high / step + 1e-9)
  return Number.isFinite(first) && last - first < 100 ? Array.from({length: last - first + 1}, (_, index) => Number(((first + index) * step).toPrecision(12))) : []
}

function logTicks(low, high, most) {
  const powers = [], begin = Math.ceil(low - 1e-9), end = Math.floor(high + 1e-9)
  for (let power = begin; power <= end; power++) powers.push(power)
  return powers.length >= 2 ? powers.filter((_, index) => index % Math.ceil(powers.length / most) === 0) : ticks(10 ** low, 10 ** high, most).filter((value) => value > 0).map(Math.log10)
}

const compact = (value) => (Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3) ? Intl.NumberFormat("en", {notation: Math.abs(value) < 1 ? "scientific" : "compact", maximumSignificantDigits: 4}).format(value) : String(Number(value.toPrecision(6))))

// Scale a canvas to the screen's pixels. Returns its context, and its size in the page's pixels.
function cleared(canvas) {
  const {clientWidth: width, clientHeight: height} = canvas, ratio = window.devicePixelRatio || 1
  canvas.width = width * ratio
  canvas.height = height * ratio
  const context = canvas.getContext("2d")
  context.scale(ratio, ratio)
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif"
  return {context, width, height}
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim()

class Chart {
  constructor(name) {
    this.name = name
    this.figure = element("figure")
    this.canvas = element("canvas")
    this.figure.append(element("figcaption", name, {title: name}), this.canvas)
    this.canvas.onpointerdown = (event) => this.press(event)
    this.canvas.onpointermove = (event) => this.point(event)
    this.canvas.onpointerleave = () => this.point(null)
    this.canvas.ondblclick = () => change({zoom: null})
    this.lines = []
  }

  draw(lines = this.lines, marked = null) {
    this.lines = lines
    const {context, width, height} = cleared(this.canvas)
    const xs = lines.flatMap((line) => (line.xs.length ? [line.xs[0], line.xs[line.xs.length - 1]] : []))
    const [left, right] = ui.zoom ?? [least(xs), largest(xs)]
    const isPoint = !(right > left) // one value, in the middle
    this.box = {left: isPoint ? left - 0.5 : left, right: isPoint ? left + 0.5 : right, width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom}
    this.fit()
    this.axes(context, css("--line"), css("--quiet"))
    context.save()
    context.beginPath()
    context.rect(MARGIN.left, MARGIN.top - 3, this.box.width, this.box.height + 6)
    context.clip()
    const other = css("--other")
    for (const line of lines) {
      const isMarked = line.group === marked, color = line.color ?? other
      if (line.highs && line.color) this.band(context, line, color)
      if (line.raw && line.color) this.stroke(context, line.xs, line.raw, color, 1, 0.35)
      this.stroke(context, line.xs, line.ys, color, isMarked ? 3.2 : line.color ? 1.8 : 1, line.color || isMarked ? 1 : 0.45)
    }
    context.restore()
    if (this.drag) {
      context.fillStyle = `${css("--accent")}33`
      context.fillRect(Math.min(...this.drag), MARGIN.top, Math.abs(this.drag[1] - this.drag[0]), this.box.height)
    }
  }

  // Let the y axis hold what is between the ends of the x axis.
  fit() {
    let low = Infinity, high = -Infinity
    for (const {xs, ys, lows, highs} of this.lines) {
      for (let index = 0; index < xs.length; index++) {
        if (xs[index] < this.box.left || xs[index] > this.box.right) continue
        const below = this.toAxis((lows ?? ys)[index]), above = this.toAxis((highs ?? ys)[index])
        if (below < low) low = below
        if (above > high) high = above
      }
    }
    if (low > high) [low, high] = [0, 1]
    const space = (high - low || Math.abs(high) || 1) * 0.04
    Object.assign(this.box, {low: low - space, high: high + space})
  }

  toAxis(value) {
    const placed = ui.log ? Math.log10(value) : value
    return Number.isFinite(placed) ? placed : NaN // NaN is in no comparison: such a point is not drawn
  }

  place(x, value) {
    const {left, right, low, high, width, height} = this.box
    return [MARGIN.left + ((x - left) / (right - left)) * width, MARGIN.top + (1 - (this.toAxis(value) - low) / (high - low)) * height]
  }

  axes(context, line, quiet) {
    const {left, right, low, high, width, height} = this.box
    context.strokeStyle = line
    context.fillStyle = quiet
    context.textAlign = "right"
    context.textBaseline = "middle"
    for (const tick of ui.log ? logTicks(low, high, 6) : ticks(low, high, 6)) {
      const y = MARGIN.top + (1 - (tick - low) / (high - low)) * height
      context.fillRect(MARGIN.left - 3, y, 3, 1)
      context.fillText(compact(ui.log ? 10 ** tick : tick), MARGIN.left - 6, y)
      context.beginPath()
      context.moveTo(MARGIN.left, y)
      context.lineTo(MARGIN.left + width, y)
      context.stroke()
    }
    context.textBaseline = "top"
    for (const tick of ticks(left, right, Math.max(3, Math.min(8, width / 90)))) {
      const x = MARGIN.left + ((tick - left) / (right - left)) * width
      context.textAlign = x > MARGIN.left + width - 20 ? "right" : "center"
      context.fillRect(x, MARGIN.top + height, 1, 3)
      context.fillText(ui.x === "time" ? duration(tick) : compact(tick), x, MARGIN.top + height + 6)
    }
    context.strokeRect(MARGIN.left, MARGIN.top, width, height)
  }

  stroke(context, xs, ys, color, width, alpha) {
    context.strokeStyle = color
    context.lineWidth = width
    context.globalAlpha = alpha
    context.lineJoin = "round"
    context.beginPath()
    let isDown = false, points = 0, at = null
    for (let index = 0; index < xs.length; index++) {
      const [x, y] = this.place(xs[index], ys[index])
      if (Number.isNaN(y)) {
        isDown = false
        continue
      }
      if (isDown) context.lineTo(x, y)
      else context.moveTo(x, y)
      isDown = true
      points += 1
      at = [x, y]
    }
    context.stroke()
    if (points === 1) { // a line of one point would not be seen
      context.fillStyle = color
      context.fillRect(at[0] - 3, at[1] - 3, 6, 6)
    }
    context.globalAlpha = 1
  }

  band(context, line, color) {
    context.beginPath()
    const last = line.xs.length - 1
    for (let index = 0; index <= last; index++) context.lineTo(...this.place(line.xs[index], line.highs[index]))
    for (let index = last; index >= 0; index--) context.lineTo(...this.place(line.xs[index], line.lows[index]))
    context.globalAlpha = 0.18
    context.fillStyle = color
    context.fill()
    context.globalAlpha = 1
  }

  // The point of a line that is nearest, if it is near.
  nearest(x, y) {
    let found = null, distance = 14 ** 2
    for (const line of this.lines) {
      for (let index = 0; index < line.xs.length; index++) {
        const [px, py] = this.place(line.xs[index], line.ys[index])
        const apart = (px - x) ** 2 + (py - y) ** 2 + (line.color ? 0 : 30) // of two, the colored one
        if (apart < distance) [found, distance] = [{line, index}, apart]
      }
    }
    return found
  }

  press(event) {
    this.drag = [event.offsetX, event.offsetX]
    this.canvas.setPointerCapture(event.pointerId)
    this.canvas.onpointerup = (end) => {
      const [from, to] = [...this.drag].sort((one, other) => one - other), {left, right, width} = this.box
      this.drag = this.canvas.onpointerup = null
      const at = (pixel) => left + ((Math.max(pixel, MARGIN.left) - MARGIN.left) / width) * (right - left)
      if (to - from > 6) return change({zoom: [at(from), Math.min(at(to), right)]})
      const near = this.nearest(end.offsetX, end.offsetY)
      if (near) choose(near.line.group.runs, event.ctrlKey || event.metaKey)
    }
  }

  point(event) {
    const near = event && !this.drag ? this.nearest(event.offsetX, event.offsetY) : null
    if (this.drag && event) this.drag[1] = event.offsetX
    if (this.drag || near?.line.group !== this.marked) this.draw(this.lines, near?.line.group ?? null)
    this.marked = near?.line.group
    id("tip").hidden = !near
    if (!near) return
    const {line, index} = near, x = line.xs[index]
    const band = line.highs ? `\n${metric(line.lows[index])}..${metric(line.highs[index])}` : ""
    const where = ui.x === "time" ? duration(x) : `${ui.x} ${count(x)}`
    id("tip").textContent = `${line.group.title}\n${where}: ${metric(line.ys[index])}${line.raw ? ` (raw ${metric(line.raw[index])})` : ""}${band}`
    id("tip").style.left = `${Math.min(event.clientX + 14, window.innerWidth - 240)}px`
    id("tip").style.top = `${event.clientY + 12}px`
  }
}

const least = (values) => values.reduce((one, other) => Math.min(one, other), Infinity)
const largest = (values) => values.reduce((one, other) => Math.max(one, other), -Infinity)
