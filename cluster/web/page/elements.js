// Elements made from words. Text is only ever text: nothing that a model or client said becomes markup.

export const byId = (id) => document.getElementById(id);

/** An element with properties, attributes (those with a dash) and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}
