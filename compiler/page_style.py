"""What pages have in common: a head that lets nothing run or load, and a style sheet.

Light and dark, and down to 320 px.
"""

from __future__ import annotations

from torch_cascade.compiler.markup import Markup, tag
from torch_cascade.compiler.page_map import map_style
from torch_cascade.compiler.picture import COLOURS, picture_style

_OWN = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1b1f;--soft:#5a5f69;--line:#c9ccd2;
--box:#f5f6f8;--good:#12672b;--bad:#9c2b16;--link:#0b57d0;--old:#fde3df;--new:#dcf3e1}
@media (prefers-color-scheme:dark){:root{--back:#15171b;--text:#e6e7ea;--soft:#a3a8b3;
--line:#454a54;--box:#1f2228;--good:#7fd494;--bad:#ff9d8a;--link:#8ab4ff;--old:#4a2420;--new:#1c3d26}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:90rem;background:var(--back);color:var(--text);
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.4rem}h2{font-size:1.2rem;border-top:1px solid var(--line);padding-top:1rem}
h3{font-size:1.05rem}h1,h2,h3{line-height:1.25}
a{color:var(--link)}.soft{color:var(--soft)}.good{color:var(--good)}.bad{color:var(--bad)}
code,.code,summary{font-family:ui-monospace,monospace;font-size:.85rem}
details{margin:.4rem 0;padding:.3rem .6rem;background:var(--box);border:1px solid var(--line);
border-radius:.3rem}
summary{cursor:pointer}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.85rem}
th,td{padding:.2rem .5rem;border:1px solid var(--line);text-align:left;vertical-align:top;
overflow-wrap:normal}
h4{margin:.4rem 0;font-size:.95rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:.6rem}
.pair>div{min-width:0}.pair .scroll{max-height:80vh;overflow:auto;border:1px solid var(--line)}
ul.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;list-style:none;font-size:.85rem}
.swatch{display:inline-block;width:.9rem;height:.9rem;margin-right:.4rem;vertical-align:-.1rem;
border:1px solid #777}
.graph a{cursor:pointer}.graph a:hover rect,.graph a:focus rect{stroke-width:3}
.panel{display:none;position:fixed;inset:auto 0 0 0;max-height:45vh;overflow:auto;
padding:.6rem 1rem;background:var(--box);border-top:3px solid var(--link);z-index:1}
.panel:target{display:block}.panel .close{float:right;padding:.3rem .6rem}
.panel td{overflow-wrap:anywhere;min-width:6rem}
.diff{width:100%;table-layout:fixed}
.diff td{width:50%;white-space:pre-wrap;overflow-wrap:anywhere;border-width:0 1px;
font-family:ui-monospace,monospace;font-size:.75rem}
.diff .changed .old:not(:empty){background:var(--old)}
.diff .changed .new:not(:empty){background:var(--new)}
@media (max-width:45rem){body{padding:.6rem}
.diff,.diff tbody,.diff tr,.diff td,.diff th{display:block;width:100%}
.diff thead,.diff .same .new,.diff td:empty{display:none}
.diff .changed .old:not(:empty)::before{content:"- "}
.diff .changed .new:not(:empty)::before{content:"+ "}
.panel thead{display:none}.panel tr,.panel td{display:block;border:0;padding:.1rem 0}
.panel tr{border-top:1px solid var(--line);padding:.3rem 0}.panel td:first-child{font-weight:bold}}
"""

_LIGHT = "".join(f".s-{part}{{background:{fill}}}" for part, (fill, _) in COLOURS.items())
_DARK = "".join(f".s-{part}{{background:{fill}}}" for part, (_, fill) in COLOURS.items())
_SWATCHES = f"{_LIGHT}@media (prefers-color-scheme:dark){{{_DARK}}}"

STYLE = f"{_OWN}{picture_style()}{map_style()}{_SWATCHES}"
"""Of pages."""


def document(title: str, content: Markup, style: str = "") -> str:
    """A whole file.

    Args:
        title: of the window.
        content: of the body.
        style: further rules.
    """
    head = Markup(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        # Even if some text were not escaped, nothing may run and nothing may be loaded.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
    )
    styles = tag("style", Markup(STYLE + style))
    inside = tag("head", head, tag("title", title), styles), Markup("\n"), tag("body", content)
    return "<!DOCTYPE html>\n" + tag("html", *inside, lang="en") + "\n"
