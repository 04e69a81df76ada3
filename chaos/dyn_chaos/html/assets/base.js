// The data, and how the page's parts are made. Text only ever becomes text: nothing here parses HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const lanes = data.lanes;
const at = (id) => document.getElementById(id);

// An element under `parent`, with attributes; children are elements or texts.
function make(parent, name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  if (parent) parent.append(element);
  return element;
}

function draw(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

const colour = (worker) => {
  const place = data.workers.indexOf(worker);
  return place < 0 ? "var(--plain)" : `var(--w${place % 8})`;
};

// Times of long runs are minutes and seconds. `step`: the difference that must be seen.
function clock(seconds, step = 0.01) {
  const digits = Math.max(0, Math.min(3, Math.ceil(-Math.log10(step) - 1e-9)));
  if (data.end - data.begin < 300) return `${seconds.toFixed(digits)} s`;
  const rounded = Number(Math.abs(seconds).toFixed(digits));
  const rest = (rounded % 60).toFixed(digits).padStart(digits ? 3 + digits : 2, "0");
  return `${seconds < 0 ? "-" : ""}${Math.floor(rounded / 60)}:${rest}`;
}

function lasting(seconds) {
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  return seconds < 100 ? `${seconds.toFixed(2)} s` : `${seconds.toFixed(0)} s`;
}

function short(number, name = "") {
  if (/rss|bytes/.test(name)) return `${(number / 1e6).toFixed(1)} MB`;
  if (Math.abs(number) >= 1e6) return `${(number / 1e6).toFixed(1)}M`;
  if (Math.abs(number) >= 1e4) return `${(number / 1e3).toFixed(1)}k`;
  return String(Number(number.toPrecision(3)));
}

const STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 36000, 86400];

// Round numbers in a range, `count` of them or a few more, and how far apart they are; of times, if `timely`.
function ticks(from, to, count, timely = false) {
  const raw = (to - from) / count, size = 10 ** Math.floor(Math.log10(raw));
  const decimal = [1, 2, 5, 10].find((each) => each * size >= raw) * size;
  const step = timely && raw > 1 ? STEPS.find((each) => each >= raw) ?? decimal : decimal;
  const made = [];
  for (let number = Math.ceil(from / step - 1e-9); number * step <= to + step * 1e-9; number++) {
    made.push(number * step);
  }
  return {step, made};
}
