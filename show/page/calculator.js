// ----------------------------------------------------------------------------------------------- the calculator

// Sizes of a model's tensors, the last first, as the backward pass reaches them; those of a layer, and the embedding.
const repeat = (n, sizes) => Array.from({ length: n }, () => sizes).flat();
const gpt2 = (layers, w) => [...repeat(layers, [4 * w * w, 4 * w * w, w * w, 3 * w * w]), 1024 * w, 50257 * w];
const llama = (layers, w, inner, keys) => [32000 * w, ...repeat(layers, [inner, inner, inner, w, keys, keys, w].map(
  (n) => n * w)), 32000 * w];
const MODELS = {
  "124M": gpt2(12, 768), "1.5B": gpt2(48, 1600), "7B": llama(32, 4096, 11008, 4096), "70B": llama(80, 8192, 28672, 1024),
};
const KINDS = ["parameters", "gradients", "main parameters", "moments", "bucket buffers"];
const colour = (kind) => `o${kind < 4 ? kind : -1}`; // as ranks have them
const REACHED = 0.4; // of a device's FLOPs, as make plan has it
const SLIDERS = { // words, least, most: powers of 10 or, of d, of 2; value at first; unit
  psi: ["Ψ, parameters", 7, 11, 9.829, ""], ranks: ["d, ranks", 0, 10, 6, ""],
  bucket: ["bucket", 0, 3.3, 2, "MiB"], link: ["link of a rank", -1, 3.6, 2.6, "Gbit/s"],
  device: ["device", -1, 3.3, 3, "TFLOP/s"], tokens: ["tokens per rank and step", 2, 6, 4, ""],
};

/** Sizes of the tensors of the model that is nearest, scaled to `psi` parameters. */
function tensors(psi) {
  const far = (sizes) => Math.abs(Math.log(total(sizes) / psi)), near = Object.values(MODELS).sort((a, b) => far(a) - far(b))[0];
  return near.map((n) => (n * psi) / total(near));
}

/** Parameters of the longest bucket: a bucket is closed when it has reached the cap. */
function longestBucket(sizes, cap) {
  let longest = 0, filled = 0;
  for (const n of sizes) {
    filled += n;
    longest = Math.max(longest, filled);
    if (filled >= cap) filled = 0;
  }
  return longest;
}

/** What DDP and the stages hold on each rank, in bytes of each of KINDS, and send; with AdamW. */
function calculate({ psi, ranks: d, bucket, is16 }) {
  const value = is16 ? 2 : 4, shard = psi / d, wire = psi * (d - 1) / d;
  const sizes = tensors(psi), whole = Math.min(psi, Math.max(shard, ...sizes)); // of an owner of whole tensors
  const buffers = 2 * value * longestBucket(sizes, (bucket * 2 ** 20) / value);
  return is16 ? [
    ["DDP", "2 + 6 + 4 + 8", [2 * psi, 6 * psi, 4 * psi, 8 * psi, 0], "2·2Ψ", 4 * wire, true],
    ["stage 1", "4 + 4/d", [2 * psi, 2 * psi, 0, 4 * whole, 0], "3·2Ψ", 6 * wire, false],
    ["stage 2", "4 + 4/d", [2 * psi, 2 * psi, 0, 4 * whole, 0], "3·2Ψ + padding", 4 * wire + 2 * whole * (d - 1), false],
    ["stage 3", "2 + 4 + 12/d", [2 * psi, 4 * psi, 4 * shard, 8 * shard, 0], "(4 + 2)Ψ", 6 * wire, false],
    ["stage 4", "2 + 16/d + b", [2 * psi, 4 * shard, 4 * shard, 8 * shard, buffers], "(2 + 2)Ψ", 4 * wire, true],
  ] : [
    ["DDP", "16", [4 * psi, 4 * psi, 0, 8 * psi, 0], "2·4Ψ", 8 * wire, true],
    ["stage 1", "8 + 8/d", [4 * psi, 4 * psi, 0, 8 * whole, 0], "3·4Ψ", 12 * wire, false],
    ["stage 2", "8 + 8/d", [4 * psi, 4 * psi, 0, 8 * whole, 0], "3·4Ψ + padding", 8 * wire + 4 * whole * (d - 1), false],
    ["stage 3", "8 + 8/d", [4 * psi, 4 * psi, 0, 8 * shard, 0], "2·4Ψ", 8 * wire, false],
    ["stage 4", "4 + 12/d + b", [4 * psi, 4 * shard, 0, 8 * shard, buffers], "2·4Ψ", 8 * wire, true],
  ];
}

const short = (number) => {
  const [size, sign] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [0, ""]].find(([least]) => number >= least);
  return `${+(number / (size || 1)).toPrecision(3)} ${sign}`.trim();
};

function drawCalculator() {
  const at = Object.fromEntries(Object.keys(SLIDERS).map((id) =>
    [id, id === "ranks" ? 2 ** $(id).value : +(10 ** $(id).value).toPrecision(4)]));
  for (const [id, [, , , , unit]] of Object.entries(SLIDERS)) $(`${id}-is`).textContent = `${short(at[id])} ${unit}`;
  const rows = calculate({ ...at, is16: $("is16").checked }), most = Math.max(...rows.map(([, , held]) => total(held)));
  const compute = (6 * at.psi * at.tokens) / (at.device * 1e12 * REACHED);
  const seconds = (n) => (n < 1 ? `${+(1000 * n).toPrecision(3)} ms` : `${+n.toPrecision(3)} s`);
  $("rows").innerHTML = rows.map(([name, formula, held, sentFormula, sent, overlaps]) => {
    const link = sent / (at.link * 1e9 / 8), floor = overlaps ? Math.max(compute, link) : compute + link;
    const bars = held.map((n, i) => `<i class="${colour(i)}" style="width:${(100 * n) / most}%" title="${KINDS[i]}"></i>`).join("");
    return `<tr><th>${name}</th><td>${short(total(held))}B<small>${formula} = ${+(total(held) / at.psi).toPrecision(3)} bytes
      per parameter</small></td><td class="stack">${bars}</td><td>${short(sent)}B<small>${sentFormula} · (d-1)/d</small></td>
      <td>${seconds(floor)}<small>${overlaps ? "max" : "sum"} of ${seconds(compute)}, ${seconds(link)}</small></td></tr>`;
  }).join("");
}

function showCalculator(isShown) {
  document.body.classList.toggle("calculates", isShown);
  if (isShown) drawCalculator();
}

function startCalculator() {
  const slider = ([id, [words, least, most, value]]) => `<label>${words} <output id="${id}-is"></output>
    <input type="range" id="${id}" min="${least}" max="${most}" step="${id === "ranks" ? 1 : 0.001}" value="${value}"></label>`;
  $("sliders").innerHTML = Object.entries(SLIDERS).map(slider).join("");
  $("models").innerHTML = Object.keys(MODELS).map((name) => `<button title="a model of ${name}">${name}</button>`).join("")
    + '<label><input type="checkbox" id="is16" checked> 16-bit parameters</label>';
  $("kinds").innerHTML = KINDS.map((kind, i) => `<span><i class="${colour(i)}"></i> ${kind}</span>`).join(" ");
  $("models").onclick = ({ target }) => {
    if (MODELS[target.textContent]) $("psi").value = Math.log10(total(MODELS[target.textContent]));
    drawCalculator();
  };
  $("sliders").oninput = drawCalculator;
}
