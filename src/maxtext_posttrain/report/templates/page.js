"use strict";

const panels = JSON.parse(document.getElementById("plots-data").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const COLOURS = 8;
const DASHES = ["solid", "dash", "dot"];

/** Unpacks the plotting library that lies in the page, and runs it. */
async function loadLibrary() {
  const packed = atob(document.getElementById("plots-library").textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  script.remove();
}

/** One run's curves have a colour each; of several runs, each run has one colour and its curves a dash each. */
function traces(panel) {
  const several = panel.traces.some((trace) => trace.run > 0);
  return panel.traces.map((trace) => {
    const line = { color: colour(`curve-${(several ? trace.run : trace.series) % COLOURS}`), width: 1.6, simplify: false };
    if (several) line.dash = DASHES[trace.series % DASHES.length];
    const lonely = trace.x.length === 1;
    return {
      type: "scatter", name: trace.name, x: trace.x, y: trace.y, line, connectgaps: false,
      mode: trace.marked || lonely ? "lines+markers" : "lines", marker: { size: 6 },
      hovertemplate: "%{y:.6~g}",
    };
  });
}

function layout(panel, log) {
  const axis = {
    gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("line"), automargin: true,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
    font: { color: colour("text"), family: "inherit", size: 12 },
    margin: { l: 48, r: 8, t: 30, b: 36 },
    xaxis: { ...axis, title: { text: "step", standoff: 4 }, hoverformat: ",d" },
    yaxis: { ...axis, type: log ? "log" : "linear", exponentformat: "power" },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("line"), activecolor: colour("faint") },
    showlegend: panel.traces.length > 1,
    legend: { orientation: "h", x: 0, y: -0.22, yanchor: "top" },
  };
}

const OPTIONS = {
  displaylogo: false,
  modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
};

function draw(index) {
  const box = document.querySelector(`[data-log="${index}"]`);
  const panel = panels[index];
  return Plotly.react(`plot-${index}`, traces(panel), layout(panel, box !== null && box.checked), OPTIONS);
}

const drawAll = () => Promise.all(panels.map((_, index) => draw(index)));

(async () => {
  if (!panels.length) return;
  await loadLibrary();
  await drawAll();
  const resized = new ResizeObserver((changes) => changes.forEach((change) => Plotly.Plots.resize(change.target)));
  document.querySelectorAll(".plot").forEach((plot) => resized.observe(plot));
  document.documentElement.dataset.drawn = String(panels.length);
  document.querySelectorAll("[data-log]").forEach((box) => box.addEventListener("change", () => draw(box.dataset.log)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})().catch((error) => {
  const place = document.getElementById("broken");
  place.textContent = `The curves can't be drawn: ${error}`;
  place.hidden = false;
  console.error(error);
});
