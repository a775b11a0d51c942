//! Per-tensor exceptions from a quantization scheme, as data:
//!
//! ```toml
//! [[rule]]
//! match = "*.attention.output.weight"   # `*` any characters, `?` one character
//! format = "q8g32"                       # f32, f16, bf16, q8g32 or q4g32; absent: as the scheme says
//! scale_search = "mse"                   # none (default) or mse
//! ```
//!
//! The first rule that matches a parameter's name decides. Vectors (norms, biases, time constants) always stay f32.

use crate::scheme::QuantScheme;
use mlcc_ir::module::{Param, ParamRole};
use mlcc_ir::types::{DType, Format};
use mlcc_quant::{PackOptions, ScaleSearch};
use serde::Deserialize;

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct QuantPolicy {
    pub rules: Vec<Rule>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
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
    Value { number: usize, key: &'static str, found: String, expected: &'static str },
    #[error(
        "quantization policy, rule {number}: match = \"{glob}\" is the name of no parameter; names are such as {example}"
    )]
    NoMatch { number: usize, glob: String, example: String },
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

const FORMATS: [DType; 5] =
    [DType::F32, DType::F16, DType::BF16, DType::Packed(Format::Q8G32), DType::Packed(Format::Q4G32)];

impl QuantPolicy {
    pub fn parse(toml: &str) -> Result<QuantPolicy, PolicyError> {
        let file: PolicyFile =
            toml::from_str(toml).map_err(|e| PolicyError::Syntax { message: e.to_string() })?;
        let rules = file.rule.into_iter().enumerate().map(|(i, rule)| Rule::read(i + 1, rule));
        Ok(QuantPolicy { rules: rules.collect::<Result<_, _>>()? })
    }

    /// Text that parses to this policy.
    pub fn to_toml(&self) -> String {
        let quoted = |text: &str| toml::Value::from(text).to_string();
        let rule = |rule: &Rule| {
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
    pub fn rule(&self, name: &str) -> Option<&Rule> {
        self.rules.iter().find(|rule| glob_matches(&rule.glob, name))
    }

    /// Storage type and packing options of a parameter.
    pub fn choose(&self, scheme: &QuantScheme, param: &Param) -> (DType, PackOptions) {
        let rule = self.rule(&param.name);
        let wanted = match (param.role, rule.and_then(|r| r.format)) {
            (ParamRole::Vector, _) | (_, None) => scheme.storage(param.role),
            (
                ParamRole::Embedding | ParamRole::Head | ParamRole::Linear | ParamRole::LowRank,
                Some(format),
            ) => format,
        };
        let dtype = if wanted.is_packed() && param.ty.rank() != 2 { DType::F32 } else { wanted };
        (dtype, PackOptions { scale_search: rule.map_or(ScaleSearch::None, |r| r.scale_search) })
    }

    /// Every rule must match something: a name that was mistyped would silently leave a tensor as it is.
    pub fn check_names<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Result<(), PolicyError> {
        for (i, rule) in self.rules.iter().enumerate() {
            if !names.clone().any(|name| glob_matches(&rule.glob, name)) {
                let example = names.clone().last().unwrap_or("(none)").into();
                return Err(PolicyError::NoMatch { number: i + 1, glob: rule.glob.clone(), example });
            }
        }
        Ok(())
    }
}

impl Rule {
    fn read(number: usize, file: RuleFile) -> Result<Rule, PolicyError> {
        let format = match file.format {
            None => None,
            Some(name) => {
                let found = FORMATS.into_iter().find(|d| d.name() == name.to_ascii_lowercase());
                let expected = "f32, f16, bf16, q8g32 or q4g32";
                Some(found.ok_or(PolicyError::Value { number, key: "format", found: name, expected })?)
            }
        };
        let scale_search = match file.scale_search.as_deref() {
            None | Some("none") => ScaleSearch::None,
            Some("mse") => ScaleSearch::Mse,
            Some(other) => {
                let (found, expected) = (other.into(), "none or mse");
                return Err(PolicyError::Value { number, key: "scale_search", found, expected });
            }
        };
        Ok(Rule { glob: file.glob, format, scale_search })
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

    fn param(name: &str, role: ParamRole, dims: &[usize]) -> Param {
        let ty = TensorType::new(DType::F32, dims.iter().copied());
        Param { name: name.into(), ty, role, source: ParamSource::Tensor(name.into()), packing: None }
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
        let (scheme, _) = QuantScheme::find("q4f16_1").unwrap();
        let chosen = |name, role, dims: &[usize]| policy.choose(&scheme, &param(name, role, dims));
        let q8 = DType::Packed(Format::Q8G32);
        assert_eq!(chosen("a.0.w", ParamRole::Linear, &[4, 4]), (q8, PackOptions::default()));
        let mse = PackOptions { scale_search: ScaleSearch::Mse };
        assert_eq!(chosen("a.1.w", ParamRole::Head, &[4, 4]), (DType::F16, mse));
        assert_eq!(chosen("a.1.bias", ParamRole::Vector, &[4]).0, DType::F32);
        assert_eq!(policy.check_names(["a.0.w"].into_iter()), Ok(()));
        let absent = QuantPolicy::parse("[[rule]]\nmatch = \"*.1.*\"").unwrap();
        assert_eq!(absent.choose(&scheme, &param("a.1.w", ParamRole::Linear, &[4, 4])).0, scheme.linear);
        let error = absent.check_names(["a.0.w"].into_iter()).unwrap_err().to_string();
        assert!(error.contains("rule 1") && error.contains("*.1.*") && error.contains("a.0.w"), "{error}");
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
