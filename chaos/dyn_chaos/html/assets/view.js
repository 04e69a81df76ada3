// The part of the run that is shown. Whatever draws over time listens.

const view = {from: data.begin, to: data.end};
const listeners = [];
let waiting = false;

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    for (const listener of listeners) listener();
  });
}

function show(from, to) {
  const whole = data.end - data.begin;
  const span = Math.min(whole, Math.max(to - from, whole / 20000));
  view.from = Math.max(data.begin, Math.min(from, data.end - span));
  view.to = view.from + span;
  redraw();
}

// `factor` < 1 zooms in; the time at `share` of the width stays where it is.
function zoom(factor, share = 0.5) {
  const span = view.to - view.from, middle = view.from + span * share;
  show(middle - span * factor * share, middle + span * factor * (1 - share));
}

// A time with as much again on both sides.
const around = (from, to) => show(from - (to - from), to + (to - from));
const shift = (share) => show(view.from + (view.to - view.from) * share, view.to + (view.to - view.from) * share);
const place = (time, width) => (time - view.from) / (view.to - view.from) * width;
const time = (x, width) => view.from + x / width * (view.to - view.from);
const until = (fault) => fault.until ?? fault.at;

const tip = at("tip");

// A text beside the pointer; none hides it.
function say(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
  const y = event.clientY + 16 + box.height > innerHeight ? event.clientY - 12 - box.height : event.clientY + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
