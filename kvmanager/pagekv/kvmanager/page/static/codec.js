// Decodes the bytes of blocks that the manager sends: three bits of state, five bits of holders.

export const STATES = ["free", "cached", "active", "shared", "pinned"];
export const HOST_STATES = ["free", "cached", "held"];
export const state = (byte) => byte & 7;
export const holders = (byte) => byte >> 3;
export const MAX_HOLDERS = 31;

function decode(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// Calls `set(index, byte)` for each block in a change; block_states.py has the format.
export function forEachChange(change, set) {
  if (change.all !== undefined) {
    decode(change.all).forEach((byte, index) => set(index, byte));
  } else if (change.runs !== undefined) {
    const data = decode(change.runs);
    const view = new DataView(data.buffer);
    for (let at = 0; at < data.length; at += 9) {
      const start = view.getUint32(at, true);
      const end = start + view.getUint32(at + 4, true);
      const byte = view.getUint8(at + 8);
      for (let index = start; index < end; index++) set(index, byte);
    }
  }
}
