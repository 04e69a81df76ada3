// Which lanes are there, in which order; links to them; the legend.

const KINDS = [
  ["all", () => true],
  ["failed", (lane) => lane.status === "failed"],
  ["with findings", (lane) => lane.findings.length > 0],
  ["moved", (lane) => lane.moved],
  ["left", (lane) => lane.status === "left"],
];
const ORDERS = {
  sent: () => 0,
  pause: (one, two) => (two.pause ?? -1) - (one.pause ?? -1),
  duration: (one, two) => two.ended - two.sent - (one.ended - one.sent),
  key: (one, two) => one.key.localeCompare(two.key, undefined, {numeric: true}),
};
const words = lanes.map((lane) => [
  lane.key, lane.rid, ...lane.attempts.flatMap((attempt) => [attempt.worker, attempt.url, attempt.cause ?? ""]),
].join("\n").toLowerCase());
let kind = 0;

const choices = KINDS.map(([name, holds], number) => {
  const count = make(null, "span", {}, String(lanes.filter(holds).length));
  const button = make(at("kinds"), "button", {"data-kind": name}, name, count);
  button.addEventListener("click", () => choose(number));
  return button;
});

function choose(number) {
  kind = number;
  const text = at("search").value.trim().toLowerCase();
  let shown = 0;
  rows.forEach((row, place) => {
    const away = at("near").checked && (row.lane.ended < view.from || row.lane.sent > view.to);
    row.hidden = away || !KINDS[kind][1](row.lane) || !words[place].includes(text);
    shown += !row.hidden;
  });
  choices.forEach((button, place) => button.setAttribute("aria-pressed", String(place === kind)));
  at("count").textContent = `${shown} of ${lanes.length}`;
  at("nothing").hidden = shown > 0;
}

function reveal(number) {
  const row = rows[number];
  if (!row) return;
  const {sent, ended} = row.lane;
  if (sent < view.from || ended > view.to || ended - sent < (view.to - view.from) / 20) around(sent, ended);
  if (row.hidden) {
    at("search").value = "";
    choose(0);
  }
  showLane(row);
  row.scrollIntoView({block: "center"});
}

// The lane that a link names; the browser itself would not know of a hidden one.
function linked(hash) {
  const found = /^#lane-(\d+)$/.exec(hash);
  if (found) reveal(Number(found[1]));
}

document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#lane-"]');
  if (!link) return;
  event.preventDefault();
  history.replaceState(null, "", link.hash);
  linked(link.hash);
});
addEventListener("hashchange", () => linked(location.hash));

at("near").addEventListener("change", () => choose(kind));
listeners.push(() => { if (at("near").checked) choose(kind); });
at("search").addEventListener("input", () => choose(kind));
at("sort").addEventListener("change", (event) => {
  const order = ORDERS[event.target.value];
  host.append(...[...rows].sort((one, two) => order(one.lane, two.lane)));
});
at("in").addEventListener("click", () => zoom(0.6));
at("out").addEventListener("click", () => zoom(1 / 0.6));
at("all").addEventListener("click", () => show(data.begin, data.end));

function legend(text, paint) {
  const svg = draw(make(at("legend"), "span"), "svg", {width: 16, height: 14});
  paint(svg);
  svg.parentNode.append(text);
}

for (const worker of data.workers) {
  const fill = {fill: colour(worker), style: "opacity: var(--fill)"};
  legend(worker, (svg) => draw(svg, "rect", {x: 1, y: 1, width: 14, height: 12, rx: 2, ...fill}));
}
legend("cut", (svg) => draw(svg, "path", {class: "cut", d: "M8 0V14M4.5 1l7 7m0 -7l-7 7"}));
legend("no worker", (svg) => draw(svg, "path", {class: "wait", d: "M0 8H16"}));
legend("first token of a continuation", (svg) => draw(svg, "path", {class: "resumed", d: "M8 2l5 5l-5 5l-5 -5Z"}));
legend("failed", (svg) => draw(svg, "path", {class: "cut", d: "M4 3l8 8m0 -8l-8 8"}));
legend("the client left", (svg) => draw(svg, "circle", {class: "gone", cx: 8, cy: 7, r: 3.5}));
if (data.faults.length) {
  legend("a fault", (svg) => draw(svg, "rect", {width: 16, height: 14, style: "fill: var(--band-edge)"}));
}

sampleCharts();
choose(0);
redraw();
linked(location.hash);
