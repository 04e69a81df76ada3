"""`python -m dyn_relay.config`: the page `docs/configuration.md`."""

from __future__ import annotations

from dyn_relay.config.table import sections


def reference() -> str:
    """The page `docs/configuration.md`."""
    lines = [
        "# Configuration",
        "",
        "<!-- Generated: python -m dyn_relay.config > docs/configuration.md -->",
        "",
        "A flag wins over its environment variable, that over the TOML file named by `--config` (or `DYN_CONFIG`).",
        "Where that is not named after its key, `DYN_` and the key in capitals counts, too; both, if set, must agree.",
        "The file's keys are the names below, at the top level. Times are seconds.",
        "`dyn-relay check` prints the effective value of each option and where it came from; keys are shown as `***`.",
        "Give keys by environment or file: flags can be read by every user of the machine.",
    ]
    for section, options in sections().items():
        lines += ["", f"## {section}", "", "| key | flag | environment | default | meaning |", "|---|---|---|---|---|"]
        for o in options:
            flag = f"`{o.flag}`" + (f" / `--no-{o.flag[2:]}`" if o.switch else "")
            default = f"`{o.show(o.default)}`" if o.show(o.default) else "unset"
            text = o.help + (f" One of {', '.join(f'`{c}`' for c in o.choices)}." if o.choices else "")
            lines.append(f"| `{o.name}` | {flag} | `{o.env}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
