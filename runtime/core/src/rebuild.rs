//! The command that builds an artifact again, read off its metadata.

use std::path::Path;

use crate::json;

/// `mlcc build` with what the metadata say of the model, the weight format, the target and the context. What
/// they do not say, or say in characters that a shell reads, is left out; the name of the model is that of
/// its folder, file or preset.
pub(crate) fn rebuild_command(path: &Path, metadata: Option<&str>) -> String {
    let metadata = metadata.unwrap_or_default();
    let value = |path: &[&str]| json::find_value(metadata, path).filter(|text| *text != "null");
    let name = |path: &[&str]| {
        let text = value(path)?.strip_prefix('"')?.strip_suffix('"')?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-,+".contains(c);
        (!text.is_empty() && !text.starts_with('-') && text.len() < 256 && text.chars().all(is_plain))
            .then(|| text.to_owned())
    };
    let number = |path: &[&str]| value(path)?.parse::<u64>().ok().filter(|&n| n > 0).map(|n| n.to_string());
    let is_kept = value(&["quantization", "keep"]) == Some("true");
    let quant = if is_kept { Some("keep".into()) } else { name(&["quantization", "scheme"]) };
    let flags = [
        ("--model", Some(name(&["model", "name"]).unwrap_or_else(|| "MODEL".into()))),
        ("--quant", quant),
        ("--target", name(&["target", "name"])),
        ("--ctx-size", number(&["memory", "context"])),
    ];
    let given = flags.into_iter().filter_map(|(flag, value)| Some(format!(" {flag} {}", value?)));
    format!("mlcc build{} -o {}", given.collect::<String>(), path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(metadata: &str) -> String {
        rebuild_command(Path::new("a.so"), Some(metadata))
    }

    #[test]
    fn it_says_what_the_metadata_say() {
        let whole = r#"{"model":{"name":"qwen3-0.6b"},"quantization":{"scheme":"q4i8","keep":false},
            "target":{"name":"x86-64-v3,x86-64-v2"},"memory":{"context":4096}}"#;
        let expected =
            "mlcc build --model qwen3-0.6b --quant q4i8 --target x86-64-v3,x86-64-v2 --ctx-size 4096 -o a.so";
        assert_eq!(command(whole), expected);
        let kept =
            r#"{"model":{"name":"m"},"quantization":{"scheme":"f32","keep":true},"memory":{"context":null}}"#;
        assert_eq!(command(kept), "mlcc build --model m --quant keep -o a.so");
    }

    #[test]
    fn it_takes_nothing_that_a_shell_reads() {
        for name in ["a; rm -rf b", "$(x)", "", "-x", "a b", "\u{1b}[31m", "ü"] {
            let metadata = format!(r#"{{"model":{{"name":"{name}"}}}}"#);
            assert_eq!(command(&metadata), "mlcc build --model MODEL -o a.so", "{name}");
        }
        for metadata in ["", "{", "[]", r#"{"model":3}"#] {
            assert_eq!(command(metadata), "mlcc build --model MODEL -o a.so", "{metadata}");
        }
        assert_eq!(rebuild_command(Path::new("a.so"), None), "mlcc build --model MODEL -o a.so");
    }
}
