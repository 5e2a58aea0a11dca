"use strict";
(async () => {
  // Colours of Okabe and Ito, which colour-blind readers can tell apart; those that are readable
  // on the page's background come first.
  const COLOURS = {
    light: ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"],
    dark: ["#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#FFFFFF"],
  };
  const MARKS = ["circle", "square-open", "diamond-open", "triangle-up-open", "x-thin-open"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const root = document.documentElement;
  const several = data.runs.length > 1;
  // Charts read a little HTML in their texts: what a record says is shown as it is.
  const plain = (text) =>
    String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const visible = new Set(data.runs.keys());
  let theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = theme;
  let colours;

  async function loadLibrary() {
    const packed = atob(element("plotly").textContent.trim());
    const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const banded = () => data.groups.length > 0 && element("bands").checked;
  const groupOf = (run) =>
    banded() ? data.groups.findIndex((members) => members.includes(run)) : -1;
  // Runs of one group share the colour of its first run.
  const colourOf = (run) => {
    const group = groupOf(run);
    return colours[(group < 0 ? run : data.groups[group][0]) % colours.length];
  };
  const faded = (colour, share) =>
    `rgba(${[1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)).join(",")},${share})`;
  const number = (value) => (value === null ? "none" : Number(value).toPrecision(4));

  // -- steps ---------------------------------------------------------------------------------

  const steps = data.runs.flatMap((run) => Object.values(run.curves).flatMap((curve) => curve.x));
  const positive = steps.filter((step) => step > 0);
  const first = positive.length ? positive.reduce((a, b) => Math.min(a, b)) : 1;
  const last = positive.length ? positive.reduce((a, b) => Math.max(a, b)) : 1;
  const logarithmic = () => element("axis").value === "log";
  // Step 0 stands to the left of the first step after it.
  const place = (step) =>
    !logarithmic() ? step : step > 0 ? Math.log10(step) : Math.log10(first) - 0.35;

  function stepAxis() {
    const low = place(steps.includes(0) ? 0 : first);
    const space = 0.02 * (place(last) - low || 1);
    const axis = { gridcolor: style("--rule"), zeroline: false, title: { text: "step" },
                   range: [low - space, place(last) + space] };
    if (!logarithmic()) return axis;
    const ticks = steps.includes(0) ? [0] : [];
    for (let power = Math.ceil(Math.log10(first)); 10 ** power <= last; power += 1)
      ticks.push(10 ** power);
    if (ticks.length < 3) ticks.push(...[first, last].filter((step) => !ticks.includes(step)));
    axis.tickvals = ticks.map(place);
    axis.ticktext = ticks.map((step) => step.toLocaleString("en"));
    axis.title.text = "step (logarithmic)";
    return axis;
  }

  function layout(more) {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style("--ink"), size: 12 },
      margin: { l: 58, r: 14, t: 34, b: 44 },
      hovermode: "closest",
      hoverlabel: { bgcolor: style("--panel"), font: { color: style("--ink") } },
      legend: { orientation: "h", y: 1.01, yanchor: "bottom", x: 0, font: { size: 11 } },
      ...more,
    };
  }

  const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };
  const draw = (id, traces, more) => Plotly.react(id, traces, layout(more), CONFIG);
  const valueAxis = (text) => ({
    title: { text: plain(text) }, gridcolor: style("--rule"), zeroline: false, automargin: true,
  });

  // -- curves over training ------------------------------------------------------------------

  const named = (name, label, lines) =>
    Object.keys(lines).length > 1 ? `${plain(name)}: ${plain(label)}` : plain(name);

  function curveTraces(run, tag, lines) {
    const order = Object.keys(lines).indexOf(tag);
    const label = lines[tag];
    const curve = data.runs[run].curves[tag];
    if (!curve || !visible.has(run)) return [];
    // Of one run each line has a colour of its own, of several each run has one.
    const colour = several ? colourOf(run) : colours[order % colours.length];
    const inGroup = groupOf(run) >= 0;
    const x = curve.x.map(place);
    const name = several ? named(data.runs[run].name, label, lines) : plain(label);
    const legendgroup = kinds(lines) ? tag : name;
    const traces = [];
    if (curve.margin && !inGroup) {
      const ends = (sign) => curve.y.map((value, at) => value + sign * (curve.margin[at] || 0));
      const none = { mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
      traces.push({ x, y: ends(-1), legendgroup, ...none });
      traces.push({ x, y: ends(1), legendgroup, fill: "tonexty",
                    fillcolor: faded(colour, 0.18), ...none });
    }
    traces.push({
      x, y: curve.y, name, legendgroup, mode: x.length > 1 ? "lines" : "markers",
      showlegend: !inGroup && !kinds(lines),
      line: { color: inGroup ? faded(colour, 0.45) : colour, width: inGroup ? 1 : 2,
              dash: several ? DASHES[order % 4] : "solid" },
      marker: { color: colour, size: 7 },
      text: x.map((_, at) => {
        const margin = curve.margin && curve.margin[at] ? ` ± ${number(curve.margin[at])}` : "";
        return `${name}<br>step ${curve.x[at].toLocaleString("en")}: ` +
          `<b>${number(curve.y[at])}</b>${margin}`;
      }),
      hovertemplate: "%{text}<extra></extra>",
    });
    if (curve.null !== undefined && Object.keys(lines).length === 1)
      traces.push(nullTrace([x[0], x[x.length - 1]], curve));
    return traces;
  }

  // A faint line at the value of rows without structure.
  const nullTrace = (x, of) => ({
    x, y: x.map(() => of.null), name: `${plain(of.null_words)}: ${number(of.null)}`,
    mode: "lines", line: { color: style("--ink"), width: 1, dash: "dot" }, hoverinfo: "name",
  });

  // Value of a curve at a step, on a straight line between its neighbours; null outside.
  function valueAt(curve, step) {
    const after = curve.x.findIndex((other) => other >= step);
    if (after < 0 || step < curve.x[0]) return null;
    if (curve.x[after] === step || after === 0) return curve.y[after];
    const share = (step - curve.x[after - 1]) / (curve.x[after] - curve.x[after - 1]);
    return curve.y[after - 1] + share * (curve.y[after] - curve.y[after - 1]);
  }

  function groupTraces(members, tag, lines) {
    const order = Object.keys(lines).indexOf(tag);
    const shown = members.filter((run) => visible.has(run) && data.runs[run].curves[tag]);
    if (shown.length < 2) return [];
    const colour = colourOf(shown[0]);
    const curves = shown.map((run) => data.runs[run].curves[tag]);
    const common = curves[0].x.filter((step) =>
      curves.every((curve) => valueAt(curve, step) !== null));
    const rows = common.map((step) => curves.map((curve) => valueAt(curve, step)));
    const x = common.map(place);
    const means = rows.map((row) => row.reduce((a, b) => a + b) / row.length);
    const some = shown.map((run) => data.runs[run].name).slice(0, 4).join(", ");
    const names = ` (${some}${shown.length > 4 ? ", ..." : ""})`;
    // Where no other run is in the picture the names, which may be long, stand above it already.
    const mean = `mean of ${shown.length} runs`;
    const name = named(mean + (members.length < data.runs.length ? names : ""), lines[tag], lines);
    const legendgroup = kinds(lines) ? tag : name;
    const none = { mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    return [
      { x, y: rows.map((row) => Math.min(...row)), legendgroup, ...none },
      { x, y: rows.map((row) => Math.max(...row)), legendgroup, fill: "tonexty",
        fillcolor: faded(colour, 0.18), ...none },
      { x, y: means, name, legendgroup, mode: "lines", showlegend: !kinds(lines),
        line: { color: colour, width: 2.6, dash: DASHES[order % 4] },
        text: common.map((step, at) =>
          `${mean}<br>step ${step.toLocaleString("en")}: ` +
          `<b>${number(means[at])}</b> (${number(Math.min(...rows[at]))} to ` +
          `${number(Math.max(...rows[at]))})`),
        hovertemplate: "%{text}<extra></extra>" },
    ];
  }

  // Of several runs with several lines each, names of all would leave no room for the lines: the
  // cards name the colours, and the legend says what is dashed how.
  const kinds = (lines) => several && Object.keys(lines).length > 1;
  const MOST_NAMES = 8;

  function kindTraces(tag, lines) {
    if (!kinds(lines)) return [];
    const dash = DASHES[Object.keys(lines).indexOf(tag) % 4];
    return [{ x: [null], y: [null], name: plain(lines[tag]), legendgroup: tag, mode: "lines",
              line: { color: style("--ink"), width: 2, dash } }];
  }

  function drawCurves(id, title, unit, lines) {
    const traces = Object.keys(lines).flatMap((tag) => [
      ...[...data.runs.keys()].flatMap((run) => curveTraces(run, tag, lines)),
      ...(banded() ? data.groups.flatMap((group) => groupTraces(group, tag, lines)) : []),
      ...kindTraces(tag, lines),
    ]);
    element(`${id}-title`).textContent = title;
    const named = traces.filter((trace) => trace.showlegend !== false);
    const legend = named.length > 1 && named.length <= MOST_NAMES;
    draw(id, traces, {
      margin: { l: 58, r: 14, t: legend ? 34 : 10, b: 44 },
      showlegend: legend,
      xaxis: stepAxis(), yaxis: { ...valueAxis(unit), rangemode: "tozero" },
    });
  }

  function drawAny() {
    const tag = element("tag").value;
    if (!tag) return;
    const { label, unit, meaning } = data.curves[tag];
    element("tag-meaning").textContent = meaning;
    drawCurves("any", label, unit, { [tag]: label });
  }

  // -- profiles and heads --------------------------------------------------------------------

  const union = (lists) => [...new Set(lists.flat())].sort((a, b) => a - b);
  const nearest = (list, step) => list.reduce((best, other, at) =>
    Math.abs(Math.log1p(other) - Math.log1p(step)) <
    Math.abs(Math.log1p(list[best]) - Math.log1p(step)) ? at : best, 0);
  const profileSteps = union(data.runs.map((run) => run.profiles.steps));

  function range(values) {
    const known = values.filter((value) => value !== null);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity);
    const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    return [Math.min(low, 0), Math.max(high, 0)];
  }

  function drawProfile() {
    const metric = element("profile-metric").value;
    if (!metric) return;
    const step = profileSteps[element("profile-step").value];
    element("profile-at").textContent = step.toLocaleString("en");
    const traces = [];
    const every = [];
    for (const [run, { name, profiles }] of data.runs.entries()) {
      const profile = profiles.values[metric];
      if (!profile || !visible.has(run)) continue;
      every.push(...profile.rows.flat());
      const at = nearest(profiles.steps, step);
      const line = (index, label, look) => ({
        x: profile.layers, y: profile.rows[index], name: plain(label), ...look,
        text: profile.layers.map((layer, place) => `${plain(label)}<br>layer ${layer}: ` +
          `<b>${number(profile.rows[index][place])}</b>`),
        hovertemplate: "%{text}<extra></extra>",
      });
      const label = (index) =>
        `${several ? `${name}, ` : ""}step ${profiles.steps[index].toLocaleString("en")}`;
      const colour = colourOf(run);
      // Runs of a group have one colour: their marks differ.
      const member = groupOf(run) < 0 ? 0 : data.groups[groupOf(run)].indexOf(run);
      const symbol = MARKS[member % MARKS.length];
      traces.push(line(0, label(0), { mode: "lines", showlegend: !several,
                                      line: { color: colour, width: 1.2, dash: "dot" } }));
      traces.push(line(at, label(at), { mode: "lines+markers", line: { color: colour, width: 2.4 },
                                        marker: { size: member ? 9 : 6, symbol } }));
      if (profile.null !== null) {
        every.push(profile.null);
        traces.push(nullTrace([profile.layers[0], profile.layers[profile.layers.length - 1]],
                              profile));
      }
    }
    const [low, high] = range(every);
    const space = 0.06 * (high - low || 1);
    draw("profile", traces, {
      showlegend: traces.length > 1,
      xaxis: { title: { text: "layer" }, gridcolor: style("--rule"), zeroline: false },
      yaxis: { ...valueAxis(data.titles[metric]), range: [low < 0 ? low - space : 0, high + space] },
    });
  }

  function drawHeads() {
    const run = data.runs[element("heads-run").value];
    const metrics = Object.keys(run.heads.values);
    element("heads").style.visibility = metrics.length ? "visible" : "hidden";
    if (!metrics.includes(element("heads-metric").value)) return;
    const metric = element("heads-metric").value;
    const { layers, rows } = run.heads.values[metric];
    const slider = element("heads-step");
    slider.max = run.heads.steps.length - 1;
    const at = Math.min(slider.value, run.heads.steps.length - 1);
    element("heads-at").textContent = run.heads.steps[at].toLocaleString("en");
    const [low, high] = range(rows.flat(2));
    const signed = low < 0;
    const limit = metric.includes("cosine") ? 1 : Math.max(-low, high);
    const heads = rows[at][0].map((_, head) => head);
    draw("heads", [{
      type: "heatmap", x: heads, y: layers, z: rows[at],
      zmin: signed ? -limit : 0, zmax: signed ? limit : high || 1,
      colorscale: signed ? [[0, "#2166AC"], [0.5, "#F7F7F7"], [1, "#B2182B"]] : "Cividis",
      colorbar: { title: { text: plain(data.titles[metric]), side: "right" }, thickness: 12, outlinewidth: 0 },
      hovertemplate: "layer %{y}, head %{x}: <b>%{z:.4g}</b><extra></extra>", xgap: 1, ygap: 1,
    }], {
      margin: { l: 58, r: 14, t: 12, b: 44 },
      xaxis: { title: { text: "head" }, showgrid: false, zeroline: false,
               dtick: heads.length > 16 ? undefined : 1 },
      yaxis: { title: { text: "layer" }, showgrid: false, zeroline: false,
               dtick: layers.length > 16 ? undefined : 1 },
    });
  }

  // -- the page ------------------------------------------------------------------------------

  function drawAll() {
    root.dataset.theme = theme;
    colours = COLOURS[theme];
    document.querySelectorAll(".card").forEach((card) => {
      card.querySelector(".dot").style.background = colourOf(Number(card.dataset.run));
    });
    const [lead, ...others] = data.charts;
    if (lead) drawCurves("lead", lead.title, lead.unit, lead.lines);
    others.forEach((chart, at) => drawCurves(`chart-${at}`, chart.title, chart.unit, chart.lines));
    drawAny();
    drawProfile();
    drawHeads();
  }

  function fill(select, names, preferred) {
    const label = (name) => name.label ?? data.titles[name] ?? data.curves[name]?.label ?? name;
    names.forEach((name) => select.add(new Option(label(name), name.value ?? name)));
    const found = preferred.find((name) => names.includes(name));
    if (found) select.value = found;
  }

  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.profiles.values)))].sort();
  fill(element("profile-metric"), names, ["anisotropy"]);
  const headMetrics = [...new Set(data.runs.flatMap((run) => Object.keys(run.heads.values)))].sort();
  fill(element("heads-metric"), headMetrics, ["attention_entropy", "qk_cosine"]);
  fill(element("heads-run"), data.runs.map((run, value) => ({ label: run.name, value })), []);
  fill(element("tag"), Object.keys(data.curves), ["cosine/mean", "variance/mean"]);
  element("heads-run-label").hidden = !several;
  element("heads-panel").hidden = !headMetrics.length;
  element("band-label").hidden = !data.groups.length;
  const longest = data.runs.reduce((most, run) => Math.max(most, run.heads.steps.length), 1);
  for (const [id, count] of [["profile-step", profileSteps.length], ["heads-step", longest]]) {
    element(id).max = count - 1;
    element(id).value = count - 1;
  }
  const margins = data.charts.some((chart) => Object.keys(chart.lines).some((tag) =>
    data.runs.some((run) => run.curves[tag] && run.curves[tag].margin)));
  element("key").textContent = [
    margins ? "Bands: 95 % intervals, over other sequences." : "",
    data.groups.length ? "Bands of several runs: from the lowest to the highest, about their mean." : "",
    "Click a name to hide its line.",
  ].filter(Boolean).join(" ");
  data.charts.slice(1).forEach((_, at) => {
    const panel = document.createElement("div");
    panel.className = "panel";
    const title = document.createElement("h3");
    title.id = `chart-${at}-title`;
    const chart = document.createElement("div");
    chart.className = "chart";
    chart.id = `chart-${at}`;
    panel.append(title, chart);
    element("charts").append(panel);
  });

  try {
    await loadLibrary();
    drawAll();
  } catch (error) {
    element("trouble").hidden = false;
    element("trouble").textContent =
      `The charts could not be drawn (${error}): a browser of 2023 or later is needed.`;
    throw error;
  }
  element("theme").onclick = () => {
    theme = theme === "dark" ? "light" : "dark";
    drawAll();
  };
  for (const id of ["axis", "bands"]) element(id).onchange = drawAll;
  for (const box of document.querySelectorAll(".toggle"))
    box.onchange = () => {
      visible[box.checked ? "add" : "delete"](Number(box.dataset.run));
      drawAll();
    };
  element("tag").onchange = drawAny;
  for (const id of ["profile-metric", "profile-step"]) element(id).oninput = drawProfile;
  for (const id of ["heads-metric", "heads-run", "heads-step"]) element(id).oninput = drawHeads;
})();
