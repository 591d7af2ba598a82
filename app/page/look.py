"""The one style sheet: light and dark as the reader's system is, from 320 pixels up, and on paper."""

CSS = """
:root{color-scheme:light dark;
--page:#f4f5f7;--card:#fff;--ink:#1c2330;--soft:#5a6475;--line:#dfe3ea;--grid:#e6e9ef;--code:#f0f2f6;
--good:#116a3a;--good-back:#dff3e6;--bad:#a3232b;--bad-back:#fbe4e4;--warn:#7a4b00;--warn-back:#fbeed3;
--busy:#1f4fa8;--busy-back:#e1eafb;--mark:#d9ecdf;--mark-line:#116a3a;
--s0:#2563c9;--s1:#c8590a;--s2:#12805c;--s3:#b3306f;--s4:#6d4bd0;--s5:#0b7c94;--s6:#8a6a00;--s7:#5b6472}
@media (prefers-color-scheme:dark){:root{
--page:#11141a;--card:#191e27;--ink:#e4e8ef;--soft:#a0aabb;--line:#2e3643;--grid:#28303c;--code:#222936;
--good:#6fd79b;--good-back:#143524;--bad:#ff9a9a;--bad-back:#421d21;--warn:#f1c36d;--warn-back:#3b2c10;
--busy:#9bbcff;--busy-back:#1b2d50;--mark:#1c4530;--mark-line:#6fd79b;
--s0:#7eaaff;--s1:#ff9d57;--s2:#58cf9f;--s3:#f58abb;--s4:#b49bff;--s5:#57c8df;--s6:#e0be4c;--s7:#aab4c3}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:70rem;margin:0 auto;padding:1.75rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:0 0 .75rem}
h3{font-size:.9rem;margin:1.1rem 0 .4rem;color:var(--soft);font-weight:600}
p{margin:.4rem 0}
a{color:var(--s0)}
.soft{color:var(--soft)}.small{font-size:.86rem}
.top{display:flex;flex-wrap:wrap;gap:.4rem .8rem;align-items:center}
.badge{font-size:.8rem;font-weight:650;padding:.16rem .62rem;border-radius:1rem;white-space:nowrap}
.good{color:var(--good);background:var(--good-back)}.bad{color:var(--bad);background:var(--bad-back)}
.warn{color:var(--warn);background:var(--warn-back)}.busy{color:var(--busy);background:var(--busy-back)}
section,.tile,.note{background:var(--card);border:1px solid var(--line);border-radius:.7rem}
section{margin-top:1rem;padding:1.1rem 1.2rem 1.2rem}
.note{margin-top:1rem;padding:.7rem 1.1rem;border-left:4px solid currentColor;overflow-wrap:anywhere;
white-space:pre-line}
.note.bad,.note.warn{border-color:currentColor}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.2rem,1fr));gap:.7rem;margin-top:1rem}
.tile{padding:.65rem .9rem .7rem}
.tile b{display:block;font-size:1.32rem;line-height:1.3;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{display:block;font-size:.82rem;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1.1rem 2rem}
.charts .wide{grid-column:1/-1}
figure{margin:0;min-width:0}
figcaption{display:flex;flex-wrap:wrap;gap:.1rem .9rem;align-items:baseline;font-weight:600;font-size:.92rem}
.key{display:inline-flex;align-items:center;gap:.35rem;font-weight:400;font-size:.84rem;color:var(--soft);
overflow-wrap:anywhere}
.key i{flex:none;width:.95rem;height:0;border-top:3px solid var(--c);border-radius:2px}
.plot{padding:.7rem 1.3rem 1.9rem 3.7rem}
.plot>svg{display:block;width:100%;height:11rem;overflow:visible}
.wide .plot>svg{height:17rem}
svg svg{overflow:visible}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
.grid{stroke:var(--grid)}.axis{stroke:var(--line)}
.line{fill:none;stroke:var(--c);stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.faint{stroke-width:1.2;opacity:.45}
.dot{fill:var(--c)}.mean{stroke-width:2.4}
.gap{stroke:var(--bad);stroke-width:1.6}
.bar{fill:var(--s0)}.bar.over{fill:var(--s1)}
.advice{padding:.65rem 0;border-top:1px solid var(--line)}.advice:first-of-type{border-top:0;padding-top:0}
.at rect{fill:transparent}.at line{stroke:var(--soft);visibility:hidden}.at circle{fill:var(--c);visibility:hidden}
.at:hover line,.at:hover circle{visibility:visible}
.pick{stroke:var(--card);stroke-width:1.5}.pick.best{stroke:var(--ink);stroke-width:2.2}
.c0{--c:var(--s0)}.c1{--c:var(--s1)}.c2{--c:var(--s2)}.c3{--c:var(--s3)}
.c4{--c:var(--s4)}.c5{--c:var(--s5)}.c6{--c:var(--s6)}.c7{--c:var(--s7)}
.rest{--c:color-mix(in srgb,var(--soft) 45%,var(--card))}
.stack{display:block;width:100%;height:2.2rem;margin-bottom:.8rem;background:var(--grid);border-radius:.4rem}
.part{fill:var(--c);stroke:var(--card);stroke-width:1}.limit{stroke:var(--bad);stroke-width:3}
.swatch{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;background:var(--c);margin-right:.5rem}
.remark{font-size:.82rem;color:var(--soft);margin:.2rem 0 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.34rem .9rem .34rem 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft);font-size:.82rem}
tbody th{font-weight:400;font-size:.9rem;white-space:nowrap}.facts th{width:1%;padding-right:1.4rem}
tr:last-child>*{border-bottom:0}
.facts td{overflow-wrap:anywhere}
.number{white-space:nowrap;text-align:right}
.heat{width:auto}.heat td{text-align:center;min-width:4.6rem;padding:.5rem .6rem;border:2px solid var(--card);
background:color-mix(in srgb,var(--s2) calc(var(--heat)*1%),var(--card));border-radius:.4rem}
.heat .best{outline:2px solid var(--ink);outline-offset:-3px}
.heat th{border:0;white-space:normal;padding-right:.7rem;vertical-align:middle;text-align:center}
.heat th:first-child{text-align:left}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:0 0 .8rem}
pre{margin:.35rem 0 .2rem;padding:.65rem .85rem;background:var(--code);border-radius:.5rem;overflow-x:auto;
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
pre.command{user-select:all;white-space:pre-wrap;overflow-wrap:anywhere}
code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.text{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:plaintext}
mark{background:var(--mark);color:inherit;border-bottom:2px solid var(--mark-line);border-radius:2px;
-webkit-box-decoration-break:clone;box-decoration-break:clone}
.row,.sample{padding:.65rem 0;border-top:1px solid var(--line)}
.row:first-of-type,.sample:first-of-type{border-top:0;padding-top:0}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,14rem),1fr));gap:.5rem .9rem;
margin-top:.45rem}
.answers>div{background:var(--code);border-radius:.5rem;padding:.45rem .75rem .55rem;min-width:0}
.answers .right{box-shadow:inset 3px 0 var(--good)}.answers .wrong{box-shadow:inset 3px 0 var(--line)}
.tick{color:var(--good);font-weight:650}
.label{display:block;font-size:.78rem;color:var(--soft)}
details{margin-top:.5rem}summary{cursor:pointer;color:var(--soft);font-size:.9rem}
details pre{max-height:34rem;overflow:auto}
footer{margin-top:1.3rem;color:var(--soft);font-size:.82rem;overflow-wrap:anywhere}
@media (max-width:30rem){main{padding:1.1rem .7rem 2rem}section{padding:.9rem .85rem 1rem}
.tiles{grid-template-columns:1fr 1fr;gap:.5rem}.wide .plot>svg{height:13rem}.plot{padding-left:3.2rem}}
@media print{body{background:#fff}section,.tile{break-inside:avoid}}
"""
