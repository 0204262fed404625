// Draws the page's figures, again in other colours when the reader's scheme changes, and the time line at each zoom.
"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const isTouch = window.matchMedia("(pointer: coarse)").matches;
  const narrow = () => window.innerWidth < 640;
  const config = { displaylogo: false, responsive: true, displayModeBar: false };
  let style = getComputedStyle(document.documentElement);

  // Replaces names of colours by the colours of the scheme.
  function coloured(value) {
    if (typeof value === "string") {
      const name = /^var\((--[\w-]+)\)$/.exec(value);
      return name ? style.getPropertyValue(name[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, coloured(inner)]));
    }
    return value;
  }

  function themed(spec) {
    const made = coloured(spec.layout);
    made.font = { family: style.fontFamily || "sans-serif", size: narrow() ? 11 : 12.5, color: coloured("var(--ink)"), ...made.font };
    made.font.family = getComputedStyle(document.body).fontFamily;
    made.hoverlabel.font.family = made.font.family;
    made.dragmode = isTouch ? false : "zoom";
    if (narrow()) {
      made.margin = { ...made.margin, l: 8, r: 4 };
      if (made.xaxis.title) made.xaxis.title.font = { size: 11 };
    }
    return made;
  }

  // -- The time line ---------------------------------------------------------------------------------

  const MOST_DRAWN = 2600; // steps drawn one by one
  const LEAST_PIXELS = 8; // of a step: narrower ones would hide each other

  function array(packed) {
    const text = atob(packed.bdata);
    const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    return packed.dtype === "i4" ? new Int32Array(bytes.buffer) : bytes;
  }

  function timeline(figure) {
    const extra = figure.extra;
    const shares = extra.shares.map(array);
    const numbers = extra.steps.map((each) => array(each.numbers));
    const times = extra.steps.map((each) => array(each.times));
    const at = (lane, step, edge) => times[lane][6 * step + edge] * extra.unit;

    // The first step of a lane that ends after a time.
    function firstAfter(lane, second) {
      let low = 0, high = numbers[lane].length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (at(lane, middle, 5) < second) low = middle + 1; else high = middle;
      }
      return low;
    }

    function within(begin, end) {
      return extra.lanes.map((_, lane) => {
        const first = firstAfter(lane, begin);
        let last = first;
        while (last < numbers[lane].length && at(lane, last, 0) <= end && last - first <= MOST_DRAWN) last++;
        return [first, last];
      });
    }

    // Whether steps can be drawn: there are some, not too many, and none of the range was left out of the page.
    function drawable(ranges, begin, end) {
      const count = ranges.reduce((sum, [first, last]) => sum + last - first, 0);
      const most = Math.max(...ranges.map(([first, last]) => last - first));
      if (!count || count > MOST_DRAWN || most * LEAST_PIXELS > document.getElementById(figure.name).clientWidth) return 0;
      if (extra.whole) return count;
      return extra.windows.some((each) => {
        const width = each.end - each.begin;
        return begin >= each.begin - width && end <= each.end + width;
      }) ? count : 0;
    }

    const blank = (name) => ({ type: "bar", name, x: [], y: [], base: [], width: [], text: [], hoverinfo: "text", textposition: "none",
      marker: { color: `var(--${name})`, line: { width: 0 } }, showlegend: true });

    function add(trace, begin, end, low, height, text) {
      trace.x.push((begin + end) / 2); trace.width.push(end - begin); trace.base.push(low); trace.y.push(height); trace.text.push(text);
    }

    function steps(ranges, begin, end) {
      const traces = extra.phases.map(blank), least = (end - begin) / 4000;
      ranges.forEach(([first, last], lane) => {
        for (let step = first; step < last; step++) {
          for (let phase = 0; phase < traces.length; phase++) {
            const from = at(lane, step, phase), to = at(lane, step, phase + 1);
            if (to - from < least) continue;
            add(traces[phase], from, to, lane, extra.fill, `<b>${extra.lanes[lane].name}</b>, step ${numbers[lane][step]}<br>` +
              `${extra.phases[phase]} ${duration(to - from)}<br>from ${from.toFixed(4)} s`);
          }
        }
      });
      return traces;
    }

    function strips() {
      const traces = extra.phases.map(blank), width = extra.span / extra.intervals, count = extra.intervals;
      extra.lanes.forEach((lane, row) => {
        for (let place = 0; place < count; place++) {
          const parts = extra.phases.map((_, phase) => shares[row][phase * count + place] / 255);
          const text = `<b>${lane.name}</b>, ${(place * width).toFixed(2)} to ${((place + 1) * width).toFixed(2)} s` +
            extra.phases.map((name, phase) => parts[phase] > 0.002 ? `<br>${name} ${(100 * parts[phase]).toFixed(0)} %` : "").join("");
          let low = row;
          parts.forEach((part, phase) => {
            const height = part * extra.fill;
            if (height > 0.004) add(traces[phase], place * width, (place + 1) * width, low, height, text);
            low += height;
          });
        }
      });
      return traces;
    }

    const duration = (seconds) => seconds < 1e-3 ? `${(1e6 * seconds).toFixed(0)} µs` : seconds < 1 ? `${(1e3 * seconds).toFixed(2)} ms`
      : `${seconds.toFixed(2)} s`;

    function marks() {
      const gone = { ...blank("gone"), name: "lost", showlegend: extra.lanes.some((lane) => lane.lost) };
      gone.marker = { color: "var(--panel)", pattern: { shape: "/", size: 7, solidity: 0.35, fgcolor: "var(--gone)", bgcolor: "var(--panel)" } };
      const stood = { ...blank("gone"), name: "stood still", showlegend: extra.lanes.some((lane) => lane.pauses.length) };
      stood.marker = { color: "var(--panel)", opacity: 0.9, pattern: { shape: "x", size: 7, solidity: 0.35, fgcolor: "var(--bad)", bgcolor: "var(--panel)" } };
      const shapes = [], annotations = [];
      extra.lanes.forEach((lane, row) => {
        if (lane.straggler) {
          shapes.push({ type: "rect", layer: "below", xref: "paper", x0: 0, x1: 1, y0: row - 0.11, y1: row + 0.89,
            fillcolor: "var(--straggler)", line: { width: 0 } });
        }
        if (lane.lost) {
          add(gone, Math.min(lane.lost.at, extra.span), extra.span, row, extra.fill, `<b>${lane.name}</b> ${lane.lost.text}`);
          shapes.push({ type: "line", x0: lane.lost.at, x1: lane.lost.at, y0: row - 0.06, y1: row + extra.fill + 0.06,
            line: { color: "var(--bad)", width: 3 } });
          annotations.push(label(`✕ ${lane.lost.text}`, lane.lost.at, row, lane.lost.at > 0.6 * extra.span));
        }
        lane.pauses.forEach((pause) => {
          add(stood, pause.begin, pause.end, row, extra.fill, `<b>${lane.name}</b> ${pause.text}`);
          annotations.push(label(pause.text, pause.begin, row, pause.begin > 0.6 * extra.span));
        });
      });
      return { traces: [gone, stood].filter((trace) => trace.x.length), shapes, annotations };
    }

    function label(text, x, row, isLeft) {
      return { x, y: row + extra.fill / 2, text: `<b>${text}</b>`, showarrow: false, xanchor: isLeft ? "right" : "left", xshift: isLeft ? -7 : 7,
        font: { color: "var(--bad)" }, bgcolor: "var(--panel)", borderpad: 3, bordercolor: "var(--bad)", borderwidth: 1 };
    }

    function ticks() {
      const isTight = extra.lanes.length > 24;
      return extra.lanes.map((lane) => {
        const name = narrow() || isTight ? String(lane.worker) : lane.name;
        const marks = narrow() || isTight ? (lane.straggler ? " ▲" : "") + (lane.lost ? " ✕" : "")
          : lane.straggler ? `<br><span style="color:${style.getPropertyValue("--warning").trim()}"><b>▲ ${lane.straggler}</b></span>`
            : lane.node ? `<br>${lane.node}` : "";
        return `${name}${marks} `;
      });
    }

    // Drawn for a range of seconds; returns what plotly.js draws, and says how.
    return function (range) {
      const [begin, end] = range || [0, extra.span];
      const ranges = within(begin, end), count = drawable(ranges, begin, end), found = marks();
      const pad = range ? 0 : 0.004 * extra.span;
      const spec = { data: [...(count ? steps(ranges, begin, end) : strips()), ...found.traces], layout: { ...figure.spec.layout } };
      spec.layout.xaxis = { ...spec.layout.xaxis, range: [begin - pad, end + pad], showgrid: true };
      spec.layout.yaxis = { ...spec.layout.yaxis, range: [extra.lanes.length - 0.1, -0.14], fixedrange: true, showgrid: false, zeroline: false,
        tickvals: extra.lanes.map((_, row) => row + extra.fill / 2), ticktext: ticks(), title: { text: narrow() ? "worker" : "" } };
      spec.layout.barmode = "overlay";
      spec.layout.bargap = 0;
      spec.layout.hovermode = "closest";
      spec.layout.shapes = found.shapes;
      spec.layout.annotations = found.annotations.filter((each) => each.x >= begin - pad && each.x <= end + pad);
      const where = extra.whole ? (isTouch ? "" : ": zoom in for single steps") : ": single steps are in the parts named here";
      const how = count ? `${count.toLocaleString("en")} steps, each drawn` : `shares of time in short intervals${where}`;
      return { spec, how };
    };
  }

  // -- Drawing -----------------------------------------------------------------------------------------

  const drawers = new Map();
  let shownRange = null;

  function draw(figure) {
    const place = document.getElementById(figure.name);
    let spec = figure.spec;
    if (drawers.has(figure.name)) {
      const made = drawers.get(figure.name)(shownRange);
      spec = made.spec;
      document.querySelector(".shown").textContent = made.how;
    }
    const made = themed(spec);
    made.height = figure.height;
    return Plotly.react(place, coloured(spec.data), made, config);
  }

  function redraw() {
    style = getComputedStyle(document.documentElement);
    return Promise.all(figures.map(draw));
  }

  function show(figure, range) {
    shownRange = range;
    document.querySelectorAll(".windows button").forEach((button) => {
      const isShown = range ? Math.abs(button.dataset.begin - range[0]) < 1e-9 && Math.abs(button.dataset.end - range[1]) < 1e-9
        : button.dataset.begin === "0" && Number(button.dataset.end) === figure.extra.span;
      button.setAttribute("aria-pressed", String(isShown));
    });
    draw(figure);
  }

  for (const figure of figures) {
    if (figure.name === "timeline") drawers.set(figure.name, timeline(figure));
  }
  redraw().then(() => {
    const figure = figures.find((each) => each.name === "timeline");
    if (figure) {
      const place = document.getElementById(figure.name);
      place.on("plotly_relayout", (change) => {
        if ("xaxis.range[0]" in change) show(figure, [Math.max(0, change["xaxis.range[0]"]), Math.min(figure.extra.span, change["xaxis.range[1]"])]);
        else if (change["xaxis.autorange"]) show(figure, null);
      });
      document.querySelectorAll(".windows button").forEach((button) => button.addEventListener("click", () => {
        const range = [Number(button.dataset.begin), Number(button.dataset.end)];
        show(figure, range[0] === 0 && range[1] === figure.extra.span ? null : range);
      }));
    }
    document.documentElement.dataset.drawn = String(figures.length);
  });
  scheme.addEventListener("change", redraw);
  let wasNarrow = narrow();
  window.addEventListener("resize", () => {
    if (narrow() !== wasNarrow) { wasNarrow = narrow(); redraw(); }
  });
})();
