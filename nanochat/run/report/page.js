// Draws the charts of a report, with an axis switch, zoom and the values at the pointer. Without it the page
// has a picture and tables.
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const BOTTOM = 34, TOP = 8, LEFT = 52, RIGHT = 12, HEIGHT = 240;
  const key = "nanochat " + location.pathname;
  const state = Object.assign({ axis: "step", zoom: null, sample: null }, remembered());
  let at = null; // the x value under the cursor
  let touched = 0; // when a person last did something, ms

  function remembered() {
    try { return JSON.parse(sessionStorage.getItem(key)) || {}; } catch { return {}; }
  }
  function remember() {
    try { sessionStorage.setItem(key, JSON.stringify(state)); } catch { /* private window */ }
  }

  // ---- Charts
  const charts = page.charts.map((spec) => {
    const figure = document.getElementById(spec.id);
    const values = figure.querySelectorAll(".legend .value");
    return { ...spec, figure, svg: figure.querySelector("svg"), values };
  });
  const axisOf = (chart) => (chart.kind === "position" ? "position" : state.axis);
  const xsOf = (chart, curve) => page.x[curve.group][axisOf(chart)];
  const isLive = (chart) => chart.kind !== "position";

  function element(name, attributes, parent, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [k, v] of Object.entries(attributes)) made.setAttribute(k, v);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }
  function extent(chartsOfAxis) {
    let low = Infinity, high = -Infinity;
    for (const chart of chartsOfAxis) for (const curve of chart.curves) for (const x of xsOf(chart, curve))
      if (x !== null) { low = Math.min(low, x); high = Math.max(high, x); }
    return low <= high ? [low, high === low ? low + 1 : high] : [0, 1];
  }
  const liveExtent = () => extent(charts.filter(isLive));
  function scale(low, high, start, end, log) {
    const read = log ? (v) => Math.log(Math.max(v, 1e-300)) : (v) => v;
    const a = read(low), b = read(high) - a || 1;
    const to = (v) => start + ((read(v) - a) / b) * (end - start);
    to.back = (px) => { const v = a + ((px - start) / (end - start)) * b; return log ? Math.exp(v) : v; };
    return to;
  }
  function visible(chart, low, high) { // [curve, indexes] in the window, with one neighbour on each side
    return chart.curves.map((curve) => {
      const xs = xsOf(chart, curve), inside = [];
      let before = -1;
      for (let i = 0; i < xs.length; i++) {
        if (xs[i] === null || curve.y[i] === null) continue;
        if (xs[i] < low) before = i;
        else { inside.push(i); if (xs[i] > high) break; }
      }
      if (before >= 0) inside.unshift(before);
      return [curve, inside];
    });
  }
  function valueRange(chart, shown) {
    let values = [];
    for (const [curve, indexes] of shown)
      for (const part of [curve.y, curve.low, curve.high])
        if (part) for (const i of indexes) values.push(part[i]);
    values = values.filter((v) => v !== null && (!chart.log || v > 0)).sort((a, b) => a - b);
    if (!values.length) return chart.log ? [0.1, 1] : [0, 1];
    const cut = Math.floor(0.002 * values.length), low = values[cut], high = values[values.length - 1 - cut];
    if (chart.log) return [low / 1.2, high * 1.2];
    const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [low - margin, high + margin];
  }

  function draw(chart) {
    const { svg } = chart, axis = axisOf(chart), width = Math.max(220, svg.clientWidth || 460);
    const [low, high] = isLive(chart) ? state.zoom || liveExtent() : extent([chart]);
    const shown = visible(chart, low, high), [yLow, yHigh] = valueRange(chart, shown);
    const bottom = HEIGHT - BOTTOM, right = width - RIGHT;
    const toX = (chart.toX = scale(low, high, LEFT, right, axis === "position"));
    const toY = (chart.toY = scale(yLow, yHigh, bottom, TOP, chart.log));
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    for (const y of chart.log ? logTicks(yLow, yHigh) : niceTicks(yLow, yHigh, 5)) {
      element("path", { class: "grid", d: `M${LEFT} ${toY(y)}H${right}` }, svg);
      element("text", { x: LEFT - 6, y: toY(y) + 4, "text-anchor": "end" }, svg, compact(+y.toPrecision(6)));
    }
    const most = Math.max(2, Math.min(6, Math.floor(width / 85)));
    const ticks = axis === "position" ? xsOf(chart, chart.curves[0])
      : axis === "time" ? timeTicks(low, high, most) : niceTicks(low, high, most);
    for (const x of ticks) {
      const label = axis === "time" ? clock(x, high - low) : compact(+x.toPrecision(6));
      const edge = toX(x) > right - 18 ? "end" : "middle";
      const px = edge === "end" ? right + 8 : toX(x);
      element("text", { x: px, y: bottom + 15, "text-anchor": edge }, svg, label);
    }
    element("path", { class: "axis", d: `M${LEFT} ${bottom}H${right}` }, svg);
    element("text", { x: (LEFT + right) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, svg, NAMES[axis]);
    const clip = element("clipPath", { id: "live-" + chart.id }, svg);
    element("rect", { x: LEFT - 5, y: 0, width: right - LEFT + 10, height: bottom }, clip);
    const plot = element("g", { "clip-path": `url(#live-${chart.id})` }, svg);
    for (const [curve, indexes] of shown) drawCurve(chart, curve, indexes, plot);
    for (const [kind, i] of chart.marks) {
      const x = xsOf(chart, chart.curves[0])[i];
      if (x === null || x < low || x > high) continue;
      const px = toX(x), d = kind === "spike" ? `M${px - 4} 1h8l-4 7z` : `M${px} ${bottom}v-12`;
      element("path", { class: "mark " + kind, d }, plot);
    }
    chart.cursor = element("g", {}, svg);
    const nothing = { class: "selection", x: 0, y: TOP, width: 0, height: bottom - TOP };
    chart.selection = element("rect", nothing, svg);
    drawCursor(chart);
  }
  function drawCurve(chart, curve, indexes, plot) {
    const xs = xsOf(chart, curve), { toX, toY } = chart;
    const bounded = (y) => Math.max(-1e4, Math.min(1e4, toY(y)));
    const point = (x, y) => `${toX(x).toFixed(1)} ${bounded(y).toFixed(1)}`;
    const path = (ids, values) => ids.map((i) => point(xs[i], values[i])).join("L");
    if (!indexes.length) return;
    const kind = `c${curve.color % 8}${curve.color >= 8 ? " dashed" : ""}`;
    if (curve.low) {
      const band = indexes.filter((i) => curve.low[i] !== null);
      const d = `M${path(band, curve.high)}L${path([...band].reverse(), curve.low)}`;
      if (band.length) element("path", { class: `band ${kind}`, d }, plot);
    }
    element("path", { class: `line ${kind}`, d: "M" + path(indexes, curve.y) }, plot);
    if (curve.dots || indexes.length === 1) for (const i of indexes)
      element("circle", { class: `dot ${kind}`, cx: toX(xs[i]), cy: bounded(curve.y[i]), r: 3 }, plot);
  }

  // ---- The cursor: one x value, shown in every chart
  function nearest(xs, ys, x) {
    let best = -1;
    for (let i = 0; i < xs.length; i++) {
      if (xs[i] === null || ys[i] === null) continue;
      if (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x)) best = i;
    }
    return best;
  }
  function drawCursor(chart) {
    chart.cursor.replaceChildren();
    const x = isLive(chart) ? at : chart.at ?? null, said = [];
    chart.curves.forEach((curve, k) => {
      const xs = xsOf(chart, curve);
      let i = xs.length - 1;
      while (i >= 0 && (xs[i] === null || curve.y[i] === null)) i--;
      if (x !== null) i = nearest(xs, curve.y, x);
      if (chart.values[k]) chart.values[k].textContent = i < 0 ? "" : compact(curve.y[i]);
      if (i < 0 || x === null) return;
      const line = `M${chart.toX(x)} ${TOP}V${HEIGHT - BOTTOM}`;
      if (!k) element("path", { class: "cursor", d: line }, chart.cursor);
      const [cx, cy] = [chart.toX(xs[i]), chart.toY(curve.y[i])];
      const look = { class: `cursor-dot c${curve.color % 8}`, cx, cy, r: 4.5 };
      if (cx >= LEFT - 1) element("circle", look, chart.cursor);
      said.push(`${curve.name} ${compact(curve.y[i])}`);
    });
    const where = x === null ? "" : showX(axisOf(chart), x);
    chart.figure.querySelector(".where").textContent = where;
    chart.svg.setAttribute("aria-valuetext", x === null ? "no point chosen" : `${where}: ${said.join(", ")}`);
    chart.svg.setAttribute("aria-valuenow", x === null ? 0 : Math.round(x));
  }
  function moveTo(chart, x) {
    touched = Date.now();
    if (!isLive(chart)) { chart.at = x; drawCursor(chart); return; }
    at = x;
    charts.filter(isLive).forEach(drawCursor);
  }
  function snapped(chart, x) { // the x of the nearest point of the chart
    let best = null;
    for (const curve of chart.curves) {
      const xs = xsOf(chart, curve), i = nearest(xs, curve.y, x);
      if (i >= 0 && (best === null || Math.abs(xs[i] - x) < Math.abs(best - x))) best = xs[i];
    }
    return best;
  }
  function zoomTo(zoom) {
    const [low, high] = liveExtent();
    if (zoom) zoom = [Math.max(low, zoom[0]), Math.min(high, zoom[1])];
    if (zoom && (zoom[1] - zoom[0] < (high - low) / 5000)) return;
    state.zoom = zoom && zoom[1] - zoom[0] < (high - low) * 0.999 ? zoom : null;
    refresh();
  }
  function zoomBy(factor) {
    const [low, high] = state.zoom || liveExtent(), middle = at ?? (low + high) / 2;
    zoomTo([middle - (middle - low) * factor, middle + (high - middle) * factor]);
  }
  function refresh() {
    touched = Date.now();
    remember();
    charts.forEach(draw);
    const reset = document.getElementById("reset");
    if (reset) reset.disabled = !state.zoom;
    for (const choice of document.querySelectorAll("[data-axis]"))
      choice.setAttribute("aria-pressed", choice.dataset.axis === state.axis);
  }

  function listen(chart) {
    const { svg } = chart;
    let from = null;
    const pixel = (event) => {
      const px = event.clientX - svg.getBoundingClientRect().left;
      return Math.max(LEFT, Math.min(px, svg.clientWidth - RIGHT));
    };
    svg.classList.add("live");
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "slider");
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      if (event.pointerType === "mouse" && isLive(chart)) {
        from = pixel(event);
        svg.setPointerCapture(event.pointerId);
      }
      moveTo(chart, snapped(chart, chart.toX.back(pixel(event))));
    });
    svg.addEventListener("pointermove", (event) => {
      const px = pixel(event);
      if (from !== null) {
        chart.selection.setAttribute("x", Math.min(from, px));
        chart.selection.setAttribute("width", Math.abs(px - from));
      }
      moveTo(chart, snapped(chart, chart.toX.back(px)));
    });
    svg.addEventListener("pointerup", (event) => {
      const px = pixel(event), start = from;
      from = null;
      if (start !== null && Math.abs(px - start) > 8)
        zoomTo([chart.toX.back(Math.min(start, px)), chart.toX.back(Math.max(start, px))]);
    });
    svg.addEventListener("pointercancel", () => { from = null; });
    svg.addEventListener("pointerleave", () => { if (from === null) moveTo(chart, null); });
    svg.addEventListener("dblclick", () => zoomTo(null));
    svg.addEventListener("keydown", (event) => onKey(chart, event));
  }
  function onKey(chart, event) {
    const known = (curve) => xsOf(chart, curve).filter((x, i) => x !== null && curve.y[i] !== null);
    const all = [...new Set(chart.curves.flatMap(known))];
    const [low, high] = isLive(chart) ? state.zoom || liveExtent() : [-Infinity, Infinity];
    const points = all.filter((x) => x >= low && x <= high).sort((a, b) => a - b);
    const now = isLive(chart) ? at : chart.at ?? null;
    const i = now === null ? points.length : points.findIndex((x) => x >= now);
    const jump = Math.max(1, Math.round(points.length / (event.shiftKey ? 10 : 100)));
    const to = { ArrowLeft: i - jump, ArrowRight: i + jump, Home: 0, End: points.length - 1 }[event.key];
    const last = points.length - 1;
    if (to !== undefined && points.length) moveTo(chart, points[Math.max(0, Math.min(last, to))]);
    else if (event.key === "+" || event.key === "=") zoomBy(0.5);
    else if (event.key === "-") zoomBy(2);
    else if (event.key === "Escape" || event.key === "0") { moveTo(chart, null); zoomTo(null); }
    else return;
    event.preventDefault();
  }

  // ---- The bar above the charts, samples, the command
  function button(parent, label, title, action) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = label;
    if (title) made.title = title;
    if (title && label.length < 2) made.setAttribute("aria-label", title);
    made.addEventListener("click", action);
    parent.append(made);
    return made;
  }
  function controls() {
    const bar = document.getElementById("controls");
    if (!bar || !charts.some(isLive)) return;
    const choice = document.createElement("div");
    choice.className = "choice";
    choice.setAttribute("role", "group");
    choice.setAttribute("aria-label", "Draw the curves against");
    for (const [axis, label] of Object.entries(page.axes))
      button(choice, label, "", () => {
        state.axis = axis;
        state.zoom = at = null;
        refresh();
      }).dataset.axis = axis;
    bar.append(choice);
    button(bar, "+", "Zoom in", () => zoomBy(0.5));
    button(bar, "\u2212", "Zoom out", () => zoomBy(2));
    button(bar, "Reset zoom", "", () => zoomTo(null)).id = "reset";
    const hint = document.createElement("small");
    hint.className = "hint";
    hint.textContent = "Drag over a chart to zoom, double-click to reset. Keys: arrows, +, \u2212, Escape.";
    bar.append(hint);
    bar.hidden = false;
  }
  function travel() { // one set of samples at a time, chosen with a slider
    const sets = [...document.querySelectorAll(".sample-set")].reverse(); // the page has the newest first
    const box = document.getElementById("travel");
    if (!box || sets.length < 2) return;
    const input = box.querySelector("input"), label = box.querySelector("output");
    const steps = sets.map((set) => Number(set.dataset.step));
    const show = (i) => {
      sets.forEach((set, k) => { set.hidden = k !== i; set.open = true; set.firstChild.hidden = true; });
      label.textContent = sets[i].querySelector("summary").textContent;
      input.setAttribute("aria-valuetext", label.textContent);
    };
    input.max = sets.length - 1;
    const kept = steps.indexOf(state.sample);
    input.value = kept < 0 ? sets.length - 1 : kept;
    input.addEventListener("input", () => {
      touched = Date.now();
      state.sample = +input.value === sets.length - 1 ? null : steps[+input.value];
      remember();
      show(+input.value);
    });
    box.hidden = false;
    show(+input.value);
  }
  function copying() {
    for (const box of document.querySelectorAll(".command")) {
      const code = box.querySelector("code");
      const made = button(box, "Copy", "", async () => {
        try { await navigator.clipboard.writeText(code.textContent); made.textContent = "Copied"; }
        catch { getSelection().selectAllChildren(code); made.textContent = "Selected"; }
        setTimeout(() => { made.textContent = "Copy"; }, 1500);
      });
      box.classList.add("copyable");
    }
  }
  function reload() { // while training goes on; less often if the page has not changed for long
    const age = Math.max(0, Date.now() / 1000 - page.written);
    const wait = Math.min(600, Math.max(15, age / 4));
    setTimeout(function again() {
      const busy = document.hidden || Date.now() - touched < 15000 || !getSelection().isCollapsed;
      if (busy) setTimeout(again, 3000);
      else location.reload();
    }, 1000 * wait);
  }

  if (!(state.axis in page.axes)) Object.assign(state, { axis: "step", zoom: null });
  controls();
  charts.forEach(listen);
  refresh();
  travel();
  copying();
  touched = 0;
  let resizing = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => charts.forEach(draw));
  });
  addEventListener("beforeprint", () => charts.forEach(draw));
  const written = document.getElementById("written");
  if (written) written.textContent = new Date(1000 * page.written).toLocaleString();
  if (page.running) reload();
})();
