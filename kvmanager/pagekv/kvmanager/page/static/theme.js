// The colours of page.css for canvases, as text and as pixels; they change with the colour scheme.

const dark = matchMedia("(prefers-color-scheme: dark)");
export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

export const onThemeChange = (listener) => dark.addEventListener("change", listener);

// Calls `listener` whenever a CSS pixel has another number of device pixels: the page is zoomed, or on another screen.
export function onRatioChange(listener) {
  const changed = () => {
    listener();
    onRatioChange(listener);
  };
  matchMedia(`(resolution: ${window.devicePixelRatio}dppx)`).addEventListener("change", changed, { once: true });
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A colour as 0xAABBGGRR, which is RGBA in the memory of every machine that runs a browser.
export function pixel(name) {
  const value = parseInt(color(name).slice(1, 7), 16);
  return (0xff000000 | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}

// Mixes two colours; `weight`, 0 to 256, is that of b.
export function mix(a, b, weight) {
  const rest = 256 - weight;
  const redBlue = (((a & 0xff00ff) * rest + (b & 0xff00ff) * weight) / 256) & 0xff00ff;
  const green = ((((a >>> 8) & 0xff) * rest + ((b >>> 8) & 0xff) * weight) & 0xff00) >>> 0;
  return (0xff000000 | redBlue | green) >>> 0;
}
