#!/usr/bin/env python3
"""Writes the fields of the configuration classes of transformers, with their defaults, for the tests that want a row for each
and the default where a file leaves a field out. `derived` has the fields whose default is computed from others.

    python tools/config_fields.py models/tests/data/config_fields.json

Needs transformers. Classes are those of the model types that the registry of model families names; types that
transformers does not have are left out. What every class inherits, and parts that are configurations of their own, are left out too.
"""

import dataclasses
import json
import pathlib
import re
import sys

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAMILIES = pathlib.Path(__file__).parent.parent / "models/src/families"


def model_types():
    texts = [path.read_text() for path in sorted(FAMILIES.glob("*.rs"))]
    return re.findall(r'model_type: "([^"]+)",\s*classes:', "".join(texts))


def plain(value):
    """As JSON, with the largest number for an infinite one."""
    if isinstance(value, float) and value == float("inf"):
        return sys.float_info.max
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def declared(kind, field):
    """The default in the class; None where the constructor computes it."""
    names = [field] + [other for other, name in kind.attribute_map.items() if name == field]
    found = [entry for entry in dataclasses.fields(kind) if entry.name in names]
    value = found[0].default if found else None
    return None if value is dataclasses.MISSING or value == "auto" else plain(value)


def fields_of(kind, inherited):
    defaults = kind().to_dict()
    own = {key: plain(value) for key, value in sorted(defaults.items()) if key not in inherited}
    # The constructor may take a declared value back for what other fields say.
    own = {key: value if declared(kind, key) is None else declared(kind, key) for key, value in own.items()}
    own = {key: value for key, value in own.items() if not key.startswith("_") and not is_part(value)}
    derived = [key for key, value in own.items() if declared(kind, key) is None and value is not None]
    return {"fields": own, "derived": derived}


def is_part(value):
    return isinstance(value, dict) and "model_type" in value


def main():
    inherited = set(transformers.PreTrainedConfig().to_dict())
    classes = {}
    for model_type in model_types():
        if model_type not in CONFIG_MAPPING:
            print(f"transformers has no {model_type}")
            continue
        kind = CONFIG_MAPPING[model_type]
        classes[model_type] = {"class": kind.__name__, **fields_of(kind, inherited)}
    found = {"source": f"transformers {transformers.__version__}", "classes": classes}
    lines = [f'"{name}": {json.dumps(found)}' for name, found in classes.items()]
    text = f'{{"source": "{found["source"]}", "classes": {{\n' + ",\n".join(lines) + "\n}}\n"
    pathlib.Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
