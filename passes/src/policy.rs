//! Per-tensor exceptions from a quantization scheme, as data:
//!
//! ```toml
//! [[rule]]
//! match = "*.attention.output.weight"   # `*` any characters, `?` one character
//! format = "q8g32"                       # f32, f16, bf16 or a packed format; absent: as the scheme says
//! scale_search = "mse"                   # none (default) or mse
//! ```
//!
//! The first rule that matches a parameter's name decides. Vectors (norms, biases, time constants) always
//! stay f32.

use crate::scheme::QuantScheme;
use mlcc_ir::module::{ModelParam, ParamRole};
use mlcc_ir::types::DType;
use mlcc_quant::{PackOptions, ScaleSearch, storage_types};
use serde::Deserialize;

/// The reason why a rule that comes too late has no effect.
const SHADOWED: &str = "earlier rules already match all of its parameters; move it before them, or remove it";

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct QuantPolicy {
    /// Name of the file for messages; empty where there is none.
    pub file: String,
    pub rules: Vec<PolicyRule>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PolicyRule {
    /// Place in the file, from 1; `None` for a rule that no user wrote, which may be without effect.
    pub number: Option<usize>,
    /// Glob over the whole parameter name.
    pub glob: String,
    /// `None`: the scheme's.
    pub format: Option<DType>,
    pub scale_search: ScaleSearch,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    #[error("quantization policy: {message}")]
    Syntax { message: String },
    #[error("quantization policy, rule {number}: {key} = \"{found}\": expected {expected}")]
    Value { number: usize, key: &'static str, found: String, expected: String },
    #[error(
        "{file}: quantization policy, rule {number}: match = \"{glob}\" matches no parameter, \
         {near}`mlcc inspect --params` lists those of an artifact, for example {example}"
    )]
    NoMatch { file: String, number: usize, glob: String, near: String, example: String },
    #[error("{file}: quantization policy, rule {number} (match = \"{glob}\") changes nothing: {why}")]
    NoEffect { file: String, number: usize, glob: String, why: String },
}

/// The file as written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    #[serde(default)]
    rule: Vec<RuleFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    #[serde(rename = "match")]
    glob: String,
    format: Option<String>,
    scale_search: Option<String>,
}

impl QuantPolicy {
    pub fn parse(toml: &str) -> Result<QuantPolicy, PolicyError> {
        let file: PolicyFile =
            toml::from_str(toml).map_err(|e| PolicyError::Syntax { message: e.to_string() })?;
        let rules = file.rule.into_iter().enumerate().map(|(i, rule)| PolicyRule::read(i + 1, rule));
        Ok(QuantPolicy { file: String::new(), rules: rules.collect::<Result<_, _>>()? })
    }

    /// Reads a policy, with the name of the file that the text is from.
    pub fn parse_file(file: impl Into<String>, toml: &str) -> Result<QuantPolicy, PolicyError> {
        Ok(QuantPolicy { file: file.into(), ..QuantPolicy::parse(toml)? })
    }

    /// Text that parses to this policy.
    pub fn to_toml(&self) -> String {
        let quoted = |text: &str| toml::Value::from(text).to_string();
        let rule = |rule: &PolicyRule| {
            let format = rule.format.map_or(String::new(), |f| format!("format = \"{}\"\n", f.name()));
            let search = match rule.scale_search {
                ScaleSearch::None => "none",
                ScaleSearch::Mse => "mse",
            };
            format!("[[rule]]\nmatch = {}\n{format}scale_search = \"{search}\"\n", quoted(&rule.glob))
        };
        self.rules.iter().map(rule).collect()
    }

    /// The rule that decides about a parameter.
    pub fn rule_for(&self, name: &str) -> Option<&PolicyRule> {
        self.rules.iter().find(|rule| glob_matches(&rule.glob, name))
    }

    /// Storage type and packing options of a parameter.
    pub fn choose_format(&self, scheme: &QuantScheme, param: &ModelParam) -> (DType, PackOptions) {
        if param.is_adapter() {
            // The runtime fills it with numbers as they are.
            return (DType::F32, PackOptions::default());
        }
        let rule = self.rule_for(&param.name);
        let wanted = match (param.role, rule.and_then(|r| r.format)) {
            (ParamRole::Vector, _) | (_, None) => scheme.storage_type(param.role),
            (
                ParamRole::Embedding | ParamRole::Head | ParamRole::Linear | ParamRole::LowRank,
                Some(format),
            ) => format,
        };
        let dtype = if wanted.is_packed() && param.ty.rank() != 2 { DType::F32 } else { wanted };
        (dtype, PackOptions { scale_search: rule.map_or(ScaleSearch::None, |r| r.scale_search) })
    }

    /// Every rule of the user must decide about at least one parameter, and ask for what at least one of
    /// those that it matches can have: one that was mistyped, or asks for what cannot be, would silently
    /// leave tensors as they are.
    pub fn check_rules<'a>(
        &self,
        scheme: &QuantScheme,
        params: impl Iterator<Item = &'a ModelParam> + Clone,
    ) -> Result<(), PolicyError> {
        let file = if self.file.is_empty() { "(no file)" } else { &self.file };
        for (i, rule) in self.rules.iter().enumerate() {
            let Some(number) = rule.number else { continue };
            let (file, glob) = (file.to_string(), rule.glob.clone());
            let matched = params.clone().filter(|p| glob_matches(&rule.glob, &p.name));
            if matched.clone().next().is_none() {
                let example = params.clone().last().map_or("(none)", |p| &p.name).into();
                let near = mlcc_files::did_you_mean(&glob, params.clone().map(|p| p.name.as_str()));
                return Err(PolicyError::NoMatch { file, number, glob, near, example });
            }
            let earlier =
                |p: &ModelParam| self.rules[..i].iter().any(|rule| glob_matches(&rule.glob, &p.name));
            let why = if matched.clone().all(earlier) {
                Some(SHADOWED.into())
            } else {
                let alone = QuantPolicy { file: String::new(), rules: vec![rule.clone()] };
                rule.without_effect(
                    &matched.map(|p| (p, alone.choose_format(scheme, p).0)).collect::<Vec<_>>(),
                )
            };
            if let Some(why) = why {
                return Err(PolicyError::NoEffect { file, number, glob, why });
            }
        }
        Ok(())
    }
}

impl PolicyRule {
    fn read(number: usize, file: RuleFile) -> Result<PolicyRule, PolicyError> {
        let format = match file.format {
            None => None,
            Some(name) => {
                let found = storage_types().find(|d| d.name() == name.to_ascii_lowercase());
                let near = mlcc_files::did_you_mean(&name, storage_types().map(|d| d.name()));
                let expected = format!("the name of a format: {near}`mlcc quants` lists all");
                Some(found.ok_or(PolicyError::Value { number, key: "format", found: name, expected })?)
            }
        };
        let scale_search = match file.scale_search.as_deref() {
            None | Some("none") => ScaleSearch::None,
            Some("mse") => ScaleSearch::Mse,
            Some(other) => {
                let (found, expected) = (other.into(), "none or mse".into());
                return Err(PolicyError::Value { number, key: "scale_search", found, expected });
            }
        };
        Ok(PolicyRule { number: Some(number), glob: file.glob, format, scale_search })
    }

    /// The reason why the rule has no effect on the parameters that it matches, with the types in which they
    /// are stored.
    fn without_effect(&self, stored: &[(&ModelParam, DType)]) -> Option<String> {
        let (example, dtype) = stored.first()?;
        let name = &example.name;
        if let Some(format) = self.format.filter(|format| stored.iter().all(|(_, dtype)| dtype != format)) {
            let why = match example.role {
                ParamRole::Vector => "vectors (norms, biases, time constants) always stay f32",
                _ => "only matrices can be packed",
            };
            return Some(format!(
                "{name} and all others that it matches cannot be {}, {why}; name other tensors, or remove the rule",
                format.name()
            ));
        }
        if self.scale_search != ScaleSearch::None && !stored.iter().any(|(_, dtype)| dtype.is_packed()) {
            return Some(format!(
                "scale_search is for packed formats, and {name} is stored as {}; give the rule such a format, or \
                 remove scale_search",
                dtype.name()
            ));
        }
        None
    }
}

/// True if the whole of `name` has the form of `glob`.
fn glob_matches(glob: &str, name: &str) -> bool {
    let (glob, name): (Vec<char>, Vec<char>) = (glob.chars().collect(), name.chars().collect());
    let (mut g, mut n) = (0, 0);
    // Where to go on if what follows the last `*` does not fit.
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        match glob.get(g) {
            Some('*') => {
                retry = Some((g + 1, n));
                g += 1;
            }
            Some(&c) if c == '?' || c == name[n] => {
                g += 1;
                n += 1;
            }
            _ => match &mut retry {
                Some((after, from)) => {
                    *from += 1;
                    (g, n) = (*after, *from);
                }
                None => return false,
            },
        }
    }
    glob[g..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use mlcc_ir::module::ParamSource;
    use mlcc_ir::types::QuantFormat;
    use mlcc_ir::types::TensorType;

    #[test]
    fn a_policy_reads_back_from_its_text() {
        let text = "[[rule]]\nmatch = \"a\\\"*\"\nformat = \"q8g32\"\n[[rule]]\nmatch = \"*\"\nscale_search = \"mse\"";
        let policy = QuantPolicy::parse(text).unwrap();
        assert_eq!(policy.rules.len(), 2);
        assert_eq!(QuantPolicy::parse(&policy.to_toml()).unwrap(), policy);
        assert_eq!(QuantPolicy::default().to_toml(), "");
    }

    #[test]
    fn globs() {
        let name = "rwkv.blocks.11.attention.output.weight";
        for glob in
            [name, "*", "rwkv.*", "*.weight", "*.1?.*output*", "rwkv.blocks.*.attention.*.weight", "**t"]
        {
            assert!(glob_matches(glob, name), "{glob}");
        }
        for glob in ["", "rwkv", "*.bias", "?", "rwkv.blocks.?.*", "*.weight?"] {
            assert!(!glob_matches(glob, name), "{glob}");
        }
        assert!(glob_matches("", "") && glob_matches("*", ""));
    }

    fn param(name: &str, role: ParamRole, dims: &[usize]) -> ModelParam {
        let ty = TensorType::new(DType::F32, dims.iter().copied());
        ModelParam { name: name.into(), ty, role, source: ParamSource::Tensor(name.into()), packing: None }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let text = r#"
            [[rule]]
            match = "*.0.*"
            format = "Q8G32"
            [[rule]]
            match = "*"
            format = "f16"
            scale_search = "mse"
            [[rule]]
            match = "a.0.w"
            format = "bf16"
        "#;
        let policy = QuantPolicy::parse(text).unwrap();
        let (scheme, _) = QuantScheme::from_name("q4f16_1").unwrap();
        let chosen = |name, role, dims: &[usize]| policy.choose_format(&scheme, &param(name, role, dims));
        let q8 = DType::Packed(QuantFormat::Q8G32);
        assert_eq!(chosen("a.0.w", ParamRole::Linear, &[4, 4]), (q8, PackOptions::default()));
        let mse = PackOptions { scale_search: ScaleSearch::Mse };
        assert_eq!(chosen("a.1.w", ParamRole::Head, &[4, 4]), (DType::F16, mse));
        assert_eq!(chosen("a.1.bias", ParamRole::Vector, &[4]).0, DType::F32);
        let absent = QuantPolicy::parse("[[rule]]\nmatch = \"*.1.*\"").unwrap();
        assert_eq!(
            absent.choose_format(&scheme, &param("a.1.w", ParamRole::Linear, &[4, 4])).0,
            scheme.linear
        );
    }

    #[test]
    fn rules_that_would_do_nothing_are_refused() {
        let params = [
            param("a.0.w", ParamRole::Linear, &[4, 4]),
            param("norm.w", ParamRole::Vector, &[4]),
            param("conv.w", ParamRole::Linear, &[4, 4, 4]),
        ];
        let check = |quant: &str, rules: &[&str]| {
            let text: String = rules.iter().map(|rule| format!("[[rule]]\n{rule}\n")).collect();
            let policy = QuantPolicy::parse_file("p.toml", &text).unwrap();
            policy
                .check_rules(&QuantScheme::from_name(quant).unwrap().0, params.iter())
                .map_err(|e| e.to_string())
        };
        let mse = "match = \"a.*\"\nscale_search = \"mse\"";
        let packed = "match = \"*\"\nformat = \"q4g32\"";
        for (quant, rules) in [
            ("q4f16_1", &[mse, packed][..]),
            ("f32", &["match = \"*\"\nformat = \"q8g32\"\nscale_search = \"mse\""]),
            ("q4f16_1", &["match = \"norm*\"\nformat = \"f32\"", "match = \"a.*\""]),
        ] {
            assert_eq!(check(quant, rules), Ok(()), "{quant} {rules:?}");
        }
        let shadowed = [packed, mse];
        for (quant, rules, parts) in [
            (
                "q4f16_1",
                &["match = \"*.1.*\""][..],
                &["p.toml", "rule 1", "*.1.*", "no parameter", "conv.w"][..],
            ),
            (
                "q4f16_1",
                &["match = \"*norm*\"\nformat = \"q4g32\""],
                &["p.toml", "rule 1", "norm.w", "vectors"],
            ),
            ("f32", &["match = \"conv*\"\nformat = \"q4g32\""], &["conv.w", "only matrices"]),
            ("f16", &[mse], &["rule 1", "scale_search", "a.0.w is stored as f16"]),
            ("q4f16_1", &shadowed, &["p.toml", "rule 2", "earlier rules"]),
        ] {
            let error = check(quant, rules).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        let message = |text| QuantPolicy::parse(text).unwrap_err().to_string();
        assert!(message("[[rule]]\nmatch = \"a\"\nformat = \"q5\"").contains("rule 1: format = \"q5\""));
        assert!(message("[[rule]]\nmatch = \"a\"\nscale_search = \"x\"").contains("none or mse"));
        assert!(message("[[rule]]\nformat = \"f16\"").contains("match"));
        assert!(message("[[rules]]\n").contains("rules"));
    }
}
