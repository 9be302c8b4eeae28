"""report.json (schema.json), report.md and report.html from one dict; the terminal's table too. Renderers compute nothing."""
