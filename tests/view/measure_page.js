// In a page: tells the one around it every text and every picture that is seen, with their boxes in pixels, and
// whether one can scroll sideways to a text.
addEventListener("load", () => {
  const box = rect => [rect.left, rect.top, rect.right, rect.bottom].map(n => Math.round(10 * n) / 10);
  const boxOf = node => box(node.getBoundingClientRect());
  const scrolls = node => Boolean(node) && node !== document.body
    && (["auto", "scroll"].includes(getComputedStyle(node).overflowX) || scrolls(node.parentElement));
  const hidden = node => ["STYLE", "SCRIPT", "TITLE", "METADATA"].includes(node.tagName.toUpperCase())
    || getComputedStyle(node).visibility === "hidden" || node.closest("details:not([open]) > :not(summary)");

  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, text = node.data.trim(), range = document.createRange();
    if (!text || hidden(node.parentElement)) continue;
    range.selectNodeContents(node);
    for (const rect of range.getClientRects())
      if (rect.width && rect.height) texts.push({text, box: box(rect), scrolls: scrolls(node.parentElement)});
  }
  const cards = svg => [...svg.querySelectorAll('rect[rx="7"]')].map(card =>
    ({box: boxOf(card), texts: [...card.parentElement.querySelectorAll("text")].map(boxOf)}));
  const shown = [...document.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width);
  const pictures = shown.map(svg =>
    ({box: boxOf(svg), texts: [...svg.querySelectorAll("text")].map(boxOf), cards: cards(svg)}));
  const wide = document.documentElement.scrollWidth;
  parent.postMessage(JSON.stringify({width: innerWidth, wide, texts, pictures}), "*");
});
