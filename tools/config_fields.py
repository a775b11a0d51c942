#!/usr/bin/env python3
"""Writes the fields of the configuration classes of transformers, with their defaults, for the test that wants a row for each.

    python tools/config_fields.py models/tests/data/config_fields.json

Needs transformers. Classes are those of the model types that the registry of model families names; types that
transformers does not have are left out. What every class inherits, and parts that are configurations of their own, are left out too.
"""

import json
import pathlib
import re
import sys

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

REGISTRY = pathlib.Path(__file__).parent.parent / "models/src/registry.rs"


def model_types():
    return re.findall(r'family\(\s*"([^"]+)"', REGISTRY.read_text())


def plain(value):
    """As JSON, with the largest number for an infinite one."""
    if isinstance(value, float) and value == float("inf"):
        return sys.float_info.max
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def fields_of(kind, inherited):
    defaults = kind().to_dict()
    own = {key: plain(value) for key, value in sorted(defaults.items()) if key not in inherited}
    return {key: value for key, value in own.items() if not key.startswith("_") and not is_part(value)}


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
        classes[model_type] = {"class": kind.__name__, "fields": fields_of(kind, inherited)}
    found = {"source": f"transformers {transformers.__version__}", "classes": classes}
    lines = [f'"{name}": {json.dumps(found)}' for name, found in classes.items()]
    text = f'{{"source": "{found["source"]}", "classes": {{\n' + ",\n".join(lines) + "\n}}\n"
    pathlib.Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
