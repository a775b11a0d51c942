//! GPUs as predictions know them (`specs/gpus.toml`, which has the source of each figure).

use serde::Deserialize;

use crate::spec::SpecError;

const FILE: &str = "gpus.toml";
const TEXT: &str = include_str!("../specs/gpus.toml");

/// A GPU. Figures without another unit are of each multiprocessor.
#[derive(Clone, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuModel {
    /// The name that `mlcc bench --predict` takes.
    pub name: String,
    pub title: String,
    /// Compute capability times ten.
    pub sm: u32,
    /// Multiprocessors of the device.
    pub sms: u32,
    pub clock_mhz: u32,
    /// 32-bit registers.
    pub registers: u32,
    /// Bytes of shared memory of all blocks together, and those that each block takes in addition.
    pub shared_bytes: u32,
    pub reserved_shared_bytes: u32,
    /// The most that are there at a time.
    pub warps: u32,
    pub blocks: u32,
    /// Properties of the device: size of the second level, bytes per clock from it to all multiprocessors,
    /// and to one.
    pub l2_bytes: u64,
    pub l2_bytes_per_clock: u32,
    pub sm_bytes_per_clock: u32,
    /// 10^9 bytes per second, read and written by copies of the device's memory.
    pub copy_gbytes_per_s: u32,
    /// 10^12 operations per second of 16-bit products on tensor cores: the data sheet's, and what products of
    /// matrices reach at best.
    pub f16_tflops: u32,
    pub dense_tflops: u32,
    /// Nanoseconds from one kernel of a graph to the next.
    pub launch_ns: u32,
    pub lanes: PipeThroughput,
    pub mma: TensorCoreRate,
    pub latency: InstrLatency,
}

/// Results per clock of each kind of instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipeThroughput {
    /// f32 additions and products.
    pub float: u32,
    pub integer: u32,
    /// f16 and bf16 in pairs.
    pub half: u32,
    pub special: u32,
    pub convert: u32,
    pub load: u32,
}

/// Tensor cores: operations per clock (a product and its sum are two), and the share of them that `mma.sync`
/// reaches.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorCoreRate {
    pub operations: u32,
    pub share: f64,
}

/// Clocks from the issue of an instruction to its result.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstrLatency {
    pub l1: u32,
    pub shared: u32,
    pub l2: u32,
    pub memory: u32,
    pub other: u32,
    /// Clocks until the operands of a store have been read.
    pub operands: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuModelsFile {
    gpu: Vec<GpuModel>,
}

/// All GPUs that predictions know, in the order of the file.
pub fn gpus() -> Result<Vec<GpuModel>, SpecError> {
    parse(TEXT)
}

fn parse(text: &str) -> Result<Vec<GpuModel>, SpecError> {
    let syntax = |message: String| SpecError::Syntax { file: FILE.into(), message };
    let file: GpuModelsFile = toml::from_str(text).map_err(|e| syntax(e.to_string()))?;
    match file.gpu.iter().find_map(|gpu| Some((gpu, fault(gpu)?))) {
        Some((gpu, fault)) => Err(syntax(format!("gpu `{}`: {fault}", gpu.name))),
        None => Ok(file.gpu),
    }
}

/// A value that nothing can be divided by.
fn fault(gpu: &GpuModel) -> Option<&'static str> {
    let PipeThroughput { float, integer, half, special, convert, load } = gpu.lanes;
    let rates = [float, integer, half, special, convert, load];
    let sizes = [gpu.sms, gpu.clock_mhz, gpu.warps, gpu.blocks, gpu.registers];
    let bytes = [gpu.l2_bytes_per_clock, gpu.sm_bytes_per_clock, gpu.copy_gbytes_per_s, gpu.dense_tflops];
    if rates.contains(&0) || sizes.contains(&0) || bytes.contains(&0) || gpu.mma.operations == 0 {
        return Some("a rate or a size is 0");
    }
    (!(gpu.mma.share > 0.0 && gpu.mma.share <= 1.0)).then_some("the share of mma is not in 0..=1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpus_are_read() {
        let all = gpus().unwrap();
        let names: Vec<&str> = all.iter().map(|gpu| gpu.name.as_str()).collect();
        assert_eq!(names, ["h200", "h100", "a100"]);
        // The data sheet's rate is that of the tensor cores at this clock.
        for gpu in &all {
            let tflops = f64::from(gpu.mma.operations * gpu.sms) * f64::from(gpu.clock_mhz) / 1e6;
            assert!((tflops / f64::from(gpu.f16_tflops) - 1.0).abs() < 0.01, "{}: {tflops}", gpu.name);
        }
    }

    #[test]
    fn rates_of_nothing_are_refused() {
        let text = TEXT.replacen("special = 16", "special = 0", 1);
        assert!(parse(&text).unwrap_err().to_string().contains("gpu `h200`: a rate or a size is 0"));
        let text = TEXT.replacen("share = 0.62", "share = 1.62", 1);
        assert!(parse(&text).unwrap_err().to_string().contains("share of mma"));
    }
}
