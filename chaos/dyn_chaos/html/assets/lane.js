// One lane: attempts as bars, the client's tokens as a curve in them, cuts and continuations as marks.

const HIGH = 28, TOP = 4, FOOT = 25;

// Pixels that a label takes, with some room.
const wide = (text) => text.length * 6.6 + 14;

function drawLane(lane, host) {
  const width = host.clientWidth;
  const svg = draw(host, "svg", {viewBox: `0 0 ${width} ${HIGH}`, height: HIGH});
  const x = (when) => Math.max(-20, Math.min(width + 20, place(when, width)));
  const y = (tokens) => FOOT - (FOOT - TOP) * tokens / Math.max(1, lane.tokens);
  drawWaits(lane, svg, x);
  for (const attempt of lane.attempts) drawAttempt(lane, attempt, svg, x, y);
  if (!lane.attempts.length) {
    drawBar(svg, x(lane.sent), x(lane.ended), "var(--plain)");
    if (lane.streaming) drawCurve(svg, curve(lane, 0, Infinity, x, y), "var(--plain)");
  }
  for (const attempt of lane.attempts) drawMarks(lane, attempt, svg, x);
  drawEnd(lane, svg, x(lane.ended));
  return svg;
}

// The times in which no attempt was under way.
function drawWaits(lane, svg, x) {
  let path = "", since = lane.sent;
  for (const {started, ended} of [...lane.attempts, {started: lane.ended, ended: lane.ended}]) {
    if (x(started) - x(since) > 2) path += `M${x(since)} ${FOOT - 10}H${x(started)}`;
    since = ended;
  }
  if (lane.attempts.length) draw(svg, "path", {class: "wait", d: path});
}

function drawBar(svg, from, to, fill) {
  const size = {x: from, y: TOP, width: Math.max(2, to - from), height: FOOT - TOP, rx: 2};
  draw(svg, "rect", {...size, fill, style: "opacity: var(--tint)"});
}

function drawCurve(svg, path, fill) {
  if (path) draw(svg, "path", {d: path, fill, style: "opacity: var(--fill)"});
}

function drawAttempt(lane, attempt, svg, x, y) {
  const fill = colour(attempt.worker), from = x(attempt.started), to = x(attempt.ended);
  drawBar(svg, from, to, fill);
  const upto = attempt.resumed + attempt.tokens;
  if (lane.streaming) drawCurve(svg, curve(lane, attempt.resumed, upto, x, y, attempt.ended), fill);
  else if (attempt.first !== null && attempt.tokens) {
    const first = x(attempt.first);
    drawCurve(svg, `M${first} ${FOOT}V${y(attempt.resumed)}L${Math.max(first + 1, to)} ${y(upto)}V${FOOT}Z`, fill);
  }
  const taken = attempt.cut && to - from > wide(attempt.cause) ? wide(attempt.cause) : 0;
  const room = to - Math.max(from, 0) - taken;
  if (room <= wide(attempt.worker)) return;
  draw(svg, "text", {class: "halo", x: Math.max(from, 0) + 5, y: TOP + 13}, attempt.worker);
}

// The client's tokens from one total to another, as steps; the last step lasts until `ended` or its own time.
function curve(lane, above, upto, x, y, ended = lane.ended) {
  let path = "", last = null;
  lane.totals.forEach((total, i) => {
    if (total <= above || total > upto) return;
    path += path ? `H${x(lane.times[i])}V${y(total)}` : `M${x(lane.times[i])} ${FOOT}V${y(total)}`;
    last = lane.times[i];
  });
  return path && `${path}H${Math.max(x(last) + 1.5, x(ended))}V${FOOT}Z`;
}

function drawMarks(lane, attempt, svg, x) {
  if (attempt.cut) {
    const here = x(attempt.ended);
    draw(svg, "path", {class: "cut", d: `M${here} 1V${FOOT + 2}M${here - 3.5} 1l7 7m0 -7l-7 7`});
    const length = here - x(attempt.started), fits = length > wide(attempt.cause);
    const before = attempt === lane.attempts[0] && here - length > wide(attempt.cause);
    if (fits || before) {
      const end = here - (fits ? 6 : length + 7);
      draw(svg, "text", {class: "halo cause", x: end, y: TOP + 13, "text-anchor": "end"}, attempt.cause);
    }
  }
  if (attempt.resumed && attempt.first !== null) {
    draw(svg, "path", {class: "resumed", d: `M${x(attempt.first)} ${FOOT - 10}l5 5l-5 5l-5 -5Z`});
  }
}

function drawEnd(lane, svg, here) {
  if (lane.status === "failed") draw(svg, "path", {class: "cut", d: `M${here - 4} ${FOOT - 14}l8 8m0 -8l-8 8`});
  if (lane.status === "left") draw(svg, "circle", {class: "gone", cx: here, cy: FOOT - 10, r: 3.5});
}

// What was going on in a lane at a time.
function told(lane, when, precision) {
  const said = [`${lane.key}  ${clock(when, precision)}`];
  const attempt = lane.attempts.findIndex((each) => each.started <= when && when <= each.ended);
  if (lane.streaming) {
    let had = 0;
    lane.times.forEach((each, i) => { if (each <= when) had = lane.totals[i]; });
    said.push(`${had} of ${lane.tokens} tokens`);
  }
  if (attempt >= 0) {
    const {worker, tokens, cause, detail} = lane.attempts[attempt];
    said.push(`attempt ${attempt} on ${worker}: ${tokens} tokens${cause ? `, ${cause} ${detail}` : ""}`);
  }
  for (const fault of data.faults) {
    if (fault.at <= when && when <= until(fault)) said.push(`${fault.kind} of ${fault.target}`);
  }
  return said.join("\n");
}
