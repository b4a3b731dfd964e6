"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displayModeBar: false };

  // Colours come from the page's own variables, so figures follow light and dark as the text does.
  // A row of the legend holds about as many names as fit; the plot keeps its height and the figure grows.
  function legendRows(figure, width) {
    const names = figure.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
    const longest = Math.max(...names.map((name) => name.length)) * 7 + 52;
    return Math.ceil(names.length / Math.max(1, Math.floor((width - 70) / longest)));
  }

  function themed(layout, rows) {
    const css = getComputedStyle(document.documentElement);
    const get = (name) => css.getPropertyValue(name).trim();
    const out = structuredClone(layout);
    out.paper_bgcolor = out.plot_bgcolor = "rgba(0,0,0,0)";
    out.font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: get("--ink") };
    out.margin = { l: 58, r: 12, t: 26, b: 56 + 21 * rows };
    out.height += 21 * (rows - 1);
    out.legend = { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" };
    out.hoverlabel = { bgcolor: get("--panel"), bordercolor: get("--line"), font: { color: get("--ink") } };
    for (const key of Object.keys(out)) {
      if (/^[xy]axis/.test(key)) {
        out[key] = { gridcolor: get("--grid"), zeroline: false, linecolor: get("--line"), ...out[key] };
      }
    }
    return out;
  }

  function draw(id) {
    const figure = figures[id];
    const width = document.getElementById(id).clientWidth;
    const layout = width < 560 && figure.narrow ? figure.narrow : figure.layout;
    return Plotly.react(id, figure.data, themed(layout, legendRows(figure, width)), config);
  }

  // Draw what is near the screen first; a run with many arms has many figures.
  const drawn = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !drawn.has(entry.target.id)) {
        drawn.add(entry.target.id);
        watcher.unobserve(entry.target);
        draw(entry.target.id);
      }
    }
  }, { rootMargin: "800px" });
  for (const id of Object.keys(figures)) watcher.observe(document.getElementById(id));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach(draw));
  addEventListener("beforeprint", () => Object.keys(figures).forEach((id) => { drawn.add(id); draw(id); }));
})();
