"use strict";
// What the words on this page mean: each is explained where it stands, by pointing, tapping or focus, and in a list at the end.

/** @type {Record<string, [string, string]>} */
const TERMS = {
  features: ["features", "The numbers that the encoder makes of an image, called h. Nearby features mean that the encoder finds two images alike."],
  embedding: ["embedding", "What the projector makes of the features during training, called z. It is thrown away afterwards."],
  views: ["view", "An image that was cropped, turned or recoloured at random. Training pulls the two views of an image together."],
  map: ["map", "UMAP draws the features in two dimensions, so that near neighbours stay near. Clusters mean something; their distance, the axes and the direction do not."],
  curvature: ["curvature", "How the nearest neighbours of an image lie around it, among the embeddings of a batch: the sum of cosines over the pairs of edges to them. Low where they surround it, high where they all lie to one side. With a kernel, Eq. (10), it is high where the neighbours are close together. Only values of one kind can be compared."],
  rho: ["ρ", "The correlation of the curvature of an image's first view with that of its second, over many images: 1 if they always agree, 0 if they have nothing in common. The curvature is the one that the run's own loss aligns, or that of Eq. (6) if it aligns none, among the images of a batch. In the table and the geometry it is of the images on this page after training; in the training chart of the last batch of each epoch."],
  agreement: ["agreement", "How alike the curvature of an image's two views is: 1 if equal, below 0 if very different. Its mean over all images is ρ."],
  outlier: ["outlier score", "How far out an image lies among the features of all: about 1 for most, 3 for one that is three times as far out. High for odd, broken or misplaced images."],
  effective_rank: ["effective rank", "How many directions the embeddings use, of all they have. Near 1 the network gives almost the same answer for every image."],
  linear: ["linear probe", "A linear classifier on the frozen features, trained with the labels of the training images: its accuracy on the test images, in percent."],
  mlp: ["hidden-layer probe", "As the linear probe, with one hidden layer."],
  knn: ["kNN", "The label that most of the nearest training images have: how often it is right for test images, in percent. Nothing is trained."],
  recall: ["recall@k", "How often a test image has one of its class among the k training images most like it, in percent."],
  mAP: ["mAP", "How far in front the training images of the same class are, when all are sorted by likeness to a test image: 100 if all come first."],
  floor: ["floor", "What the same probe reaches without pretraining. A useful encoder is clearly above."],
  read_as: ["read as", "The class that the linear probe predicts. It is asked only about test images, because it was trained on the labels of the others."],
  confidence: ["confidence", "The probability that the linear probe gives to its prediction."],
  loss: ["loss", "What training makes small. Losses of different methods have different scales and cannot be compared."],
  invariance: ["invariance", "The part of the loss that pulls the two views of an image together."],
  redundancy: ["redundancy", "The part of the loss that keeps the dimensions of the embedding from repeating each other."],
  curvature_alignment: ["curvature alignment", "The part of the loss that gives the two views of an image the same curvature."],
  curvature_decorrelation: ["curvature decorrelation", "The part of the loss that keeps the curvature of different images from being alike."],
  variance: ["variance", "The part of the loss that keeps the embeddings of different images apart."],
  covariance: ["covariance", "The part of the loss that keeps the dimensions of the embedding from repeating each other."],
  chord: ["chord", "The part of the loss that puts a blend of two images on the line between their embeddings."],
  path: ["path", "The part of the loss that puts a view midway between two others on the line between their embeddings."],
  z_std: ["spread of z", "The standard deviation of the embeddings over images. Near 0 all images have the same embedding."],
  rankme: ["RankMe", "How many directions the features use. Higher is better, between runs of the same kind."],
  alpha_req: ["α-ReQ", "How fast the spectrum of the features falls. Good near 1; 0 is noise."],
  nesum: ["NESum", "Variance of the features over that of their strongest direction. Higher is better."],
  stable_rank: ["stable rank", "NESum without centring: low if all features share one offset."],
  selfcluster: ["SelfCluster", "0 if the directions of the features are spread evenly, 1 if they are all the same. Lower is better."],
  twonn: ["TwoNN", "The dimension of the surface on which the features lie, from the distances to two neighbours. To compare runs."],
  lidar: ["LiDAR", "How many directions tell images apart, more than views of one image. Higher is better."],
  grad_norm: ["gradient norm", "The length of the gradient. Sudden peaks are a sign of unstable training."],
  views_per_s: ["views per second", "Augmented images that pass through the network in a second of training."],
  lr: ["learning rate", "The size of the steps that the optimiser takes."],
  duplicates: ["near-duplicates", "Images with almost the same features and pixels: copies, crops, or shots of one moment."],
  typical: ["typical", "Images that are each the most central of many: together they show what there is."],
};

/** A word with its explanation. @param {string} id of TERMS @param {string} [text] @returns {HTMLElement | string} */
function term(id, text) {
  if (!(id in TERMS)) return text ?? id;
  return element("button", { type: "button", class: "term", "aria-describedby": `term-${id}`, "data-term": id }, text ?? TERMS[id][0]);
}

/** @param {HTMLElement | null} word the one to explain, or none */
function explain(word) {
  const box = byId("explain");
  box.hidden = !word;
  if (!word) return;
  box.textContent = byId(`term-${word.dataset.term}`).textContent;
  const at = word.getBoundingClientRect();
  const left = Math.max(8, Math.min(at.left, innerWidth - box.offsetWidth - 8));
  const top = at.bottom + 6 + box.offsetHeight > innerHeight ? at.top - box.offsetHeight - 6 : at.bottom + 6;
  box.style.transform = `translate(${left}px, ${Math.max(8, top)}px)`;
}

function glossary() {
  const wordAt = (/** @type {Event} */ event) => (event.target instanceof Element ? /** @type {HTMLElement | null} */ (event.target.closest(".term")) : null);
  for (const kind of ["pointerover", "focusin", "click"]) {
    document.addEventListener(kind, (event) => {
      const word = wordAt(event);
      if (word || kind !== "focusin") explain(word);
    });
  }
  document.addEventListener("focusout", () => explain(null));
  document.addEventListener("scroll", () => explain(null), { passive: true, capture: true });
  byId("glossary").replaceChildren(...Object.entries(TERMS).flatMap(([id, [name, text]]) => [
    element("dt", {}, name), element("dd", { id: `term-${id}` }, text, id === "rho" ? kinds() : "")]));
}

/** Which curvature the ρ of each run on the page is of. @returns {string} */
function kinds() {
  const of = (/** @type {string} */ kind) => new Set(mapped.filter((run) => run.kind === kind).map((run) => payload.groups[payload.runs[run.id].group].name));
  const each = [...new Set(mapped.map((run) => run.kind))].map((kind) => `${[...of(kind)].join(", ")}: ${kind}`);
  return each.length ? ` Here it is, of ${each.join("; of ")}.${each.length > 1 ? " Compare only ρ of the same curvature." : ""}` : "";
}
