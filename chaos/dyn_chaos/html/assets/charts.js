// Charts over time: bars of equal width on top of each other, or lines.

function frame(svg, width, height, low, high, name) {
  for (const fault of data.faults) {
    const from = place(fault.at, width), to = place(until(fault), width);
    if (to < 0 || from > width) continue;
    draw(svg, "rect", {class: "fault-band", x: from, y: 0, width: Math.max(1.5, to - from), height});
  }
  const y = (value) => height - 2 - (value - low) / (high - low || 1) * (height - 14);
  for (const tick of ticks(low, high, 2).made) {
    draw(svg, "line", {class: "grid", x1: 0, x2: width, y1: y(tick), y2: y(tick)});
    draw(svg, "text", {class: "halo", x: 3, y: y(tick) - 2}, short(tick, name));
  }
  return y;
}

function canvas(host, height) {
  host.querySelector("svg")?.remove();
  const width = Math.max(50, host.clientWidth), svg = draw(host, "svg", {viewBox: `0 0 ${width} ${height}`, height});
  return [svg, width];
}

// `stacks`: [colour, name, values]; the values are of equal parts of the run.
function bars(host, height, stacks) {
  const [svg, width] = canvas(host, height);
  const count = stacks[0][2].length, step = (data.end - data.begin) / count;
  const sums = stacks[0][2].map((_, bin) => stacks.reduce((sum, stack) => sum + stack[2][bin], 0));
  const y = frame(svg, width, height, 0, Math.max(...sums) || 1);
  const under = sums.map(() => 0);
  for (const [fill, , values] of stacks) {
    let path = "";
    values.forEach((value, bin) => {
      const from = place(data.begin + bin * step, width), to = place(data.begin + (bin + 1) * step, width);
      const low = y(under[bin]), high = y(under[bin] + value);
      if (value && to > 0 && from < width) path += `M${from} ${low}V${high}H${to}V${low}Z`;
      under[bin] += value;
    });
    draw(svg, "path", {d: path, fill, opacity: 0.8, "shape-rendering": "crispEdges"});
  }
  return (when) => {
    const bin = Math.min(count - 1, Math.max(0, Math.floor((when - data.begin) / step)));
    return stacks.map(([, name, values]) => `${short(values[bin])} tokens/s ${name}`).join("\n");
  };
}

// `series` of one name, as in the data.
function lines(host, height, series) {
  const [svg, width] = canvas(host, height);
  const all = series.flatMap((each) => each.values);
  let low = Math.min(...all), high = Math.max(...all);
  if (low >= 0 && low < high * 0.75) low = 0;
  if (low === high) [low, high] = low > 0 ? [0, low * 1.25] : [low, low + 1];
  const y = frame(svg, width, height, low, high, series[0].name);
  series.forEach((each, number) => {
    const stroke = each.worker ? colour(each.worker) : `var(--w${number % 8})`;
    const points = each.at.map((when, i) => `${place(when, width).toFixed(1)} ${y(each.values[i]).toFixed(1)}`);
    draw(svg, "path", {class: "series", d: `M${points.join("L")}`, stroke});
  });
  return (when) => series.map((each) => {
    const after = each.at.findIndex((one) => one > when);
    const value = each.values[after < 0 ? each.at.length - 1 : Math.max(0, after - 1)];
    return `${short(value, each.name)} ${each.label}`;
  }).join("\n");
}

function hover(host, tell) {
  host.addEventListener("pointermove", (event) => {
    const box = host.getBoundingClientRect();
    const when = time(event.clientX - box.left, box.width);
    say(event, `${clock(when, (view.to - view.from) / 500)}\n${tell()(when)}`);
  });
  host.addEventListener("pointerleave", (event) => say(event, ""));
}

function sampleCharts() {
  const families = new Map(), still = [];
  for (const series of data.samples) families.set(series.name, [...families.get(series.name) || [], series]);
  for (const [name, series] of families) {
    const all = series.flatMap((each) => each.values), last = series.map((each) => each.values.at(-1));
    if (all.every((value) => value === all[0])) {
      still.push(`${name} ${short(all[0], name)}`);
      continue;
    }
    const figure = make(at("charts"), "figure");
    const range = `${short(Math.min(...all), name)} to ${short(Math.max(...all), name)}`;
    const end = last.map((value) => short(value, name)).join(", ");
    make(figure, "figcaption", {}, name, make(null, "span", {}, `${range}, at the end ${end}`));
    const host = make(figure, "div", {class: "track"});
    let tell;
    listeners.push(() => { tell = lines(host, 90, series); });
    hover(host, () => tell);
  }
  at("constant").textContent = still.length ? `Never changed: ${still.join(", ")}.` : "";
  at("samples").hidden = !data.samples.length;
}
