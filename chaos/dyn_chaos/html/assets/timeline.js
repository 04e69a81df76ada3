// All lanes. Only those that can be seen are drawn.

const timeline = at("timeline"), host = at("lanes");
const seen = new Set();
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) seen.add(entry.target);
    else {
      seen.delete(entry.target);
      entry.target.lastChild.replaceChildren();
    }
  }
  redraw();
}, {root: timeline, rootMargin: "300px 0px"});

const rows = lanes.map((lane, number) => {
  const found = lane.findings.length ? " found" : "";
  const row = make(null, "div", {class: `lane ${lane.status}${found}`, id: `lane-${number}`});
  const name = make(row, "button", {class: "name", title: `${lane.key} ${lane.rid}`}, make(null, "i", {class: "dot"}));
  make(name, "b", {}, lane.key);
  make(name, "small", {}, `${lane.tokens} tok`);
  make(row, "div", {class: "track"});
  row.lane = lane;
  watcher.observe(row);
  return row;
});
host.append(...rows);

const marks = data.faults.map(({until}) => make(at("bands"), "div", {class: until === null ? "" : "ends"}));
const chips = data.faults.map(({kind, target}) => make(at("faults"), "button", {class: "fault"}, `${kind} ${target}`));
at("faultrow").hidden = !data.faults.length;

let tellRates;

function drawTop() {
  const axis = at("axis"), [svg, width] = canvas(axis, 20);
  const {step, made} = ticks(view.from, view.to, Math.max(2, Math.floor(width / 110)), true);
  for (const tick of made) {
    const x = place(tick, width);
    draw(svg, "line", {class: "grid", x1: x, x2: x, y1: 0, y2: 5});
    draw(svg, "text", {x, y: 16, "text-anchor": x < 20 ? "start" : "middle"}, clock(tick, step));
  }
  const stacks = [["var(--rate)", "of streams", data.streams], ["var(--pale)", "of unary answers", data.unary]];
  tellRates = bars(at("rates"), 64, stacks);
  drawFaults(width);
  let top = 0;
  for (const row of timeline.querySelectorAll(".top:not([hidden])")) {
    row.style.top = `${top}px`;
    top += row.offsetHeight;
  }
}

// Chips go where there is room; in the sixth row they may lie on each other.
function drawFaults(width) {
  const ends = [];
  data.faults.forEach((fault, number) => {
    const from = place(fault.at, width), to = place(until(fault), width);
    const shown = to >= 0 && from <= width, chip = chips[number];
    marks[number].hidden = chip.hidden = !shown;
    if (!shown) return;
    marks[number].style.left = `${from}px`;
    marks[number].style.width = `${Math.max(1.5, to - from)}px`;
    const left = Math.min(Math.max(from, 0), width - 30), need = chip.textContent.length * 6.4 + 12;
    const size = Math.max(to - left, Math.min(need, width - left));
    let row = ends.findIndex((end) => end <= left);
    if (row < 0) row = Math.min(ends.length, 5);
    ends[row] = Math.max(left + size + 2, ends[row] ?? 0);
    chip.style.left = `${left}px`;
    chip.style.width = `${size}px`;
    chip.style.top = `${row * 19 + 1}px`;
  });
  at("faults").style.height = `${ends.length * 19 + 2}px`;
}

function drawLanes() {
  for (const row of seen) {
    row.lastChild.replaceChildren();
    drawLane(row.lane, row.lastChild);
  }
}

listeners.push(drawTop, drawLanes);
new ResizeObserver(redraw).observe(at("axis"));

host.addEventListener("pointermove", (event) => {
  const track = event.target.closest(".track");
  if (!track) return say(event, "");
  const box = track.getBoundingClientRect();
  const when = time(event.clientX - box.left, box.width);
  return say(event, told(track.parentNode.lane, when, (view.to - view.from) / 500));
});
host.addEventListener("pointerleave", (event) => say(event, ""));
hover(at("rates"), () => tellRates);

timeline.addEventListener("wheel", (event) => {
  const box = at("axis").getBoundingClientRect();
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  if (event.ctrlKey || event.metaKey) zoom(1.0015 ** event.deltaY, share);
  else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) shift(sideways / box.width);
  else return;
  event.preventDefault();
}, {passive: false});

// Dragging over the rates chooses a time.
at("rates").addEventListener("pointerdown", (event) => {
  const rates = at("rates"), box = rates.getBoundingClientRect(), from = event.clientX - box.left;
  const mark = make(rates, "div", {class: "select"});
  rates.setPointerCapture(event.pointerId);
  const move = (moved) => {
    const to = Math.min(box.width, Math.max(0, moved.clientX - box.left));
    mark.style.left = `${Math.min(from, to)}px`;
    mark.style.width = `${Math.abs(to - from)}px`;
    return to;
  };
  const end = (ended) => {
    const to = move(ended);
    rates.removeEventListener("pointermove", move);
    mark.remove();
    if (Math.abs(to - from) > 4) show(time(Math.min(from, to), box.width), time(Math.max(from, to), box.width));
  };
  rates.addEventListener("pointermove", move);
  rates.addEventListener("pointerup", end, {once: true});
});

const KEYS = {"+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show(data.begin, data.end),
  ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2)};
timeline.addEventListener("keydown", (event) => {
  if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  KEYS[event.key]();
  event.preventDefault();
});
