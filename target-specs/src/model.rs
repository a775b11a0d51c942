//! The processor model of this machine, and the models that a level is for.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The processors that a level is tuned for.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostProcessors {
    /// The vendor in /proc/cpuinfo: `AuthenticAMD`, `GenuineIntel`, or ARM's number of an implementer
    /// (`0x41`).
    pub vendor: String,
    /// Family, not on AArch64.
    pub family: Option<u32>,
    /// First and last of each range of models (parts, on AArch64).
    pub models: Vec<[u32; 2]>,
}

/// The model that a processor reports.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessorModel {
    pub vendor: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub family: Option<u32>,
    pub model: u32,
}

impl fmt::Display for ProcessorModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.family {
            Some(family) => write!(f, "{} family {family} model {}", self.vendor, self.model),
            None => write!(f, "{} part {:#x}", self.vendor, self.model),
        }
    }
}

impl HostProcessors {
    pub fn includes(&self, found: &ProcessorModel) -> bool {
        let within = |[first, last]: &[u32; 2]| (*first..=*last).contains(&found.model);
        self.vendor == found.vendor && self.family == found.family && self.models.iter().any(within)
    }
}

/// The model of this machine; `None` where the system does not tell it, or has cores of several models.
pub fn detected_model() -> Option<ProcessorModel> {
    one_model(&std::fs::read_to_string("/proc/cpuinfo").ok()?)
}

/// The model in a text in the form of Linux's /proc/cpuinfo, if all processors have the same.
fn one_model(text: &str) -> Option<ProcessorModel> {
    let mut processors = text.split("\n\n").filter_map(model_of);
    let first = processors.next()?;
    processors.all(|other| other == first).then_some(first)
}

fn model_of(processor: &str) -> Option<ProcessorModel> {
    let field = |name: &str| {
        let lines = processor.lines().filter_map(|line| line.split_once(':'));
        lines.into_iter().find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
    };
    let number = |name: &str| {
        let value = field(name)?;
        match value.strip_prefix("0x") {
            Some(hexadecimal) => u32::from_str_radix(hexadecimal, 16).ok(),
            None => value.parse().ok(),
        }
    };
    if let Some(vendor) = field("vendor_id") {
        return Some(ProcessorModel {
            vendor: vendor.into(),
            family: Some(number("cpu family")?),
            model: number("model")?,
        });
    }
    Some(ProcessorModel {
        vendor: field("CPU implementer")?.into(),
        family: None,
        model: number("CPU part")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ZEN_4: &str = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n";
    const NEOVERSE_V2: &str = "processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU architecture: 8\n\
                               CPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n";

    #[test]
    fn models_are_read_as_linux_tells_them() {
        let zen = ProcessorModel { vendor: "AuthenticAMD".into(), family: Some(25), model: 17 };
        assert_eq!(one_model(ZEN_4), Some(zen.clone()));
        assert_eq!(one_model(&format!("{ZEN_4}\n{ZEN_4}")), Some(zen.clone()));
        let arm = ProcessorModel { vendor: "0x41".into(), family: None, model: 0xd4f };
        assert_eq!(one_model(NEOVERSE_V2), Some(arm.clone()));
        // Cores of two kinds are no one model.
        let other = NEOVERSE_V2.replace("0xd4f", "0xd0c");
        assert_eq!(one_model(&format!("{NEOVERSE_V2}\n{other}")), None);
        assert_eq!(one_model("processor : 0\nhart : 0\n"), None);

        let named = |model: &ProcessorModel| {
            let specs = crate::specs().unwrap();
            let found = specs
                .iter()
                .flat_map(|s| &s.machines)
                .find(|m| m.host.as_ref().is_some_and(|h| h.includes(model)));
            found.map(|machine| machine.name.clone())
        };
        assert_eq!(named(&zen).as_deref(), Some("znver4"));
        assert_eq!(named(&arm).as_deref(), Some("neoverse-v2"));
        assert_eq!(named(&ProcessorModel { family: Some(24), ..zen }), None);
        let sapphire = ProcessorModel { vendor: "GenuineIntel".into(), family: Some(6), model: 143 };
        assert_eq!(named(&sapphire).as_deref(), Some("sapphirerapids"));
    }
}
