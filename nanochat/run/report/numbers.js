// Numbers of a report as people read them: with units, as durations, as ticks of an axis.
"use strict";
function compact(v) {
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (Math.abs(v) >= unit && Math.abs(v) < 1e16)
      return +(v / (name === "k" ? 1e3 : unit)).toPrecision(4) + name;
  if (Number.isInteger(v)) return v.toLocaleString("en");
  return Math.abs(v) < 1e-4 ? v.toExponential(2) : String(+v.toPrecision(4));
}
function duration(s) {
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  if (s < 60) return +s.toPrecision(3) + " s";
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}
const clock = (s, span) => span < 120 ? compact(s) + " s" : span < 7200 ? compact(s / 60) + " min"
  : span < 172800 ? compact(s / 3600) + " h" : compact(s / 86400) + " d";
const NAMES = { step: "step", tokens: "tokens", time: "time in steps", position: "tokens of context" };
function showX(axis, x) {
  if (axis === "time") return duration(x);
  const n = axis === "tokens" ? compact(x) + " tokens" : "step " + Math.round(x).toLocaleString("en");
  return axis === "position" ? `up to ${x} tokens of context` : n;
}
function niceTicks(low, high, most) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(span / most));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= (span / most) * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++)
    ticks.push(i * step + 0); // -0 + 0 is 0
  return ticks;
}
function timeTicks(low, high, most) {
  const span = high - low, unit = span < 120 ? 1 : span < 7200 ? 60 : span < 172800 ? 3600 : 86400;
  return niceTicks(low / unit, high / unit, most).map((t) => t * unit);
}
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const skip = Math.max(1, Math.ceil((last - first) / 6)), tens = [];
  for (let e = first; e <= last; e += skip) tens.push(10 ** e);
  const inside = (t) => low <= t && t <= high;
  const ticks = tens.filter(inside);
  return ticks.length > 2 ? ticks : tens.flatMap((t) => [t, 2 * t, 5 * t]).filter(inside);
}
