// What is known of one request, or of one fault.

const panel = at("details");
let chosen = null;

function open(title) {
  const inner = panel.lastElementChild;
  inner.replaceChildren(make(null, "h2", {}, title));
  panel.hidden = false;
  panel.scrollTop = 0;
  document.body.classList.add("split");
  return inner;
}

function close() {
  panel.hidden = true;
  document.body.classList.remove("split");
  chosen?.classList.remove("chosen");
  chosen = null;
}

function plain(value) {
  if (typeof value === "number") return String(Number(value.toFixed(4)));
  return typeof value === "object" ? JSON.stringify(value, null, 1).replace(/\n */g, " ") : String(value);
}

function pairs(parent, entries) {
  const list = make(parent, "dl");
  for (const [name, value] of entries) {
    if (value === null || value === "" || value === undefined) continue;
    make(list, "dt", {}, name);
    make(list, "dd", {}, plain(value));
  }
}

function showLane(row) {
  close();
  chosen = row;
  row.classList.add("chosen");
  const lane = row.lane, inner = open(lane.key);
  for (const [check, message] of lane.findings) {
    make(inner, "p", {class: "problem"}, make(null, "b", {}, check), ` ${message}`);
  }
  pairs(inner, [
    ["answer", `${lane.status}${lane.why ? `: ${lane.why}` : ""}`], ["rid", lane.rid], ["status", lane.http],
    ["mode", lane.streaming ? "stream" : "unary"], ["sent", clock(lane.sent)], ["ended", clock(lane.ended)],
    ["lasted", lasting(lane.ended - lane.sent)], ["tokens", lane.tokens],
    ["longest pause", lane.pause === null ? null : lasting(lane.pause)],
  ]);
  if (lane.attempts.length) showAttempts(inner, lane);
  const parts = {
    "The answer’s counters": lane.meta,
    "The router’s row": lane.row,
    Request: lane.body,
    "Response headers": lane.headers,
  };
  for (const [title, part] of Object.entries(parts)) {
    if (!Object.keys(part).length) continue;
    make(inner, "h3", {}, title);
    pairs(inner, Object.entries(part));
  }
}

function showAttempts(inner, lane) {
  make(inner, "h3", {}, "Attempts");
  const table = make(inner, "table"), head = make(make(table, "thead"), "tr");
  for (const name of ["", "worker", "began", "first", "ended", "tokens"]) make(head, "th", {}, name);
  const body = make(table, "tbody");
  lane.attempts.forEach((attempt, number) => {
    const tokens = `${attempt.tokens}${attempt.resumed ? ` after ${attempt.resumed}` : ""}`;
    const first = attempt.first === null ? "–" : clock(attempt.first);
    const cells = [number, attempt.worker, clock(attempt.started), first, clock(attempt.ended), tokens];
    const row = make(body, "tr", {title: `${attempt.url} ${attempt.rid}`});
    for (const cell of cells) make(row, "td", {}, String(cell));
    if (attempt.cause) {
      const why = make(make(body, "tr"), "td", {colspan: 6}, `${attempt.cause} ${attempt.detail}`);
      if (attempt.cut) why.className = "problem";
    }
  });
}

const undone = (fault) => fault.until === null ? "never" : clock(fault.until);

function showFault(fault) {
  close();
  const lasted = fault.until === null ? null : lasting(fault.until - fault.at);
  pairs(open(`${fault.kind} ${fault.target}`), [
    ["target", fault.url], ["began", clock(fault.at)], ["undone", undone(fault)], ["lasted", lasted],
    ["proof", fault.proof], ["choice", fault.choice],
  ]);
}

host.addEventListener("click", (event) => {
  const row = event.target.closest(".lane");
  if (row) showLane(row);
});
host.addEventListener("dblclick", (event) => {
  const row = event.target.closest(".lane");
  if (row) around(row.lane.sent, row.lane.ended);
});
chips.forEach((chip, number) => {
  const fault = data.faults[number];
  chip.addEventListener("click", () => showFault(fault));
  chip.addEventListener("dblclick", () => around(fault.at, until(fault)));
  const told = `${chip.textContent}\nat ${clock(fault.at)}, undone ${undone(fault)}\n${fault.proof}`;
  chip.addEventListener("pointermove", (event) => say(event, told));
  chip.addEventListener("pointerleave", (event) => say(event, ""));
});
panel.querySelector(".close").addEventListener("click", close);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
