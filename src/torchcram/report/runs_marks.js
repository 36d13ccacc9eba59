"use strict";

// The charts: one per <figure data-chart="N">, drawn from entry N of the data. No number is
// computed here that the tables do not also have; text goes in as text, never as HTML.

const COLOURS = 8;
const DASHES = ["", "8 4", "2 4", "10 4 2 4"];
const MARKERS = [
  "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
  "M-4 -4h8v8h-8z",
  "M0 -5.2L5 3.8H-5z",
  "M0 -5.6L5.6 0L0 5.6L-5.6 0z",
  "M0 5.2L5 -3.8H-5z",
  "M-5 -1.7h3.3v-3.3h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3z",
];
const REACH = 48; // px within which a mouse finds a point

function html(parent, tag, properties) {
  const made = Object.assign(document.createElement(tag), properties);
  parent.append(made);
  return made;
}

function shape(parent, tag, attributes) {
  const made = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

function paint(style) {
  return {
    color: `var(--c${style % COLOURS})`,
    dash: DASHES[style % DASHES.length],
    marker: MARKERS[style % MARKERS.length],
  };
}

// what a series looks like, for the legend: a line, a marker, or both
function swatch(parent, svg, series) {
  const look = paint(series.style);
  const made = shape(svg, "svg", { viewBox: "0 0 34 14", "aria-hidden": "true" });
  parent.append(made);
  const line = { d: "M0 7H34", class: "line", stroke: look.color };
  const marker = { d: look.marker, transform: "translate(17 7)", fill: look.color };
  if (series.line !== false) shape(made, "path", { ...line, "stroke-dasharray": look.dash });
  if (!series.front) shape(made, "path", marker);
}

function niceStep(range, parts) {
  const rough = range / parts;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function ticks(low, high, step) {
  const count = Math.floor((high - low) / step + 1e-9);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return Array.from({ length: count + 1 }, (_, i) => {
    const value = low + i * step;
    return { value, text: value.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1") };
  });
}
