//! Switches, from environment variables that begin with `SOFTCUDA_`. An unknown one is an error, as is a
//! value that does not fit.

use std::path::PathBuf;

use crate::exec::launch::WarpOrder;

#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// `SOFTCUDA_DEVICES`: how many GPUs there are.
    pub devices: i32,
    /// `SOFTCUDA_UUID`: a number that tells this machine's GPUs from those of another process.
    pub uuid: u32,
    /// `SOFTCUDA_SM`: compute capability times ten.
    pub sm: u32,
    /// `SOFTCUDA_VERSION`: CUDA version of the driver times 1000, as `cuDriverGetVersion` gives it (12040 is
    /// 12.4).
    pub version: u32,
    /// `SOFTCUDA_ORDER`: `turns`, `backwards` or `random:SEED`, the order in which warps take turns.
    pub order: WarpOrder,
    /// `SOFTCUDA_CHECKS`: `on`, or `off` for speed: what was written by whom in global memory is not known
    /// then.
    pub checks: bool,
    /// `SOFTCUDA_MEMORY`: bytes of device memory.
    pub memory: u64,
    /// `SOFTCUDA_MAPPED`: most bytes of it that are mapped into reserved addresses, as where other programs
    /// have the rest.
    pub mapped: u64,
    /// `SOFTCUDA_MAPPING`: `on`, or `off` for a device that cannot map memory into reserved addresses.
    pub mapping: bool,
    /// `SOFTCUDA_GRANULE`: bytes of a piece of mapped memory.
    pub granule: u64,
    /// `SOFTCUDA_REFUSE_CAPTURES`: the number of recordings of a stream that fail.
    pub refuse_captures: u64,
    /// `SOFTCUDA_LOSE_AFTER`: the number of launches after which the device is lost.
    pub lose_after: u64,
    /// `SOFTCUDA_COUNTS`: a file for what launches did.
    pub counts: Option<PathBuf>,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            devices: 1,
            uuid: 0,
            sm: 90,
            version: 12_040,
            order: WarpOrder::Turns,
            checks: true,
            memory: 16 << 30,
            mapped: u64::MAX,
            mapping: true,
            granule: 2 << 20,
            refuse_captures: 0,
            lose_after: u64::MAX,
            counts: None,
        }
    }
}

const PREFIX: &str = "SOFTCUDA_";

impl DeviceOptions {
    pub fn from_environment() -> Result<Self, String> {
        let mut options = Self::default();
        for (name, value) in std::env::vars_os() {
            let Some(name) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
            let value = value.to_string_lossy();
            options.set(name, &value).map_err(|what| format!("{PREFIX}{name}={value}: {what}"))?;
        }
        Ok(options)
    }

    /// One switch, named without its prefix.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let number = || value.parse::<u64>().map_err(|_| "expected a number".to_string());
        let small = || value.parse::<u32>().map_err(|_| "expected a number".to_string());
        let switch = || match value {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err("expected on or off".to_string()),
        };
        match name {
            "DEVICES" => self.devices = i32::try_from(small()?).map_err(|_| "too many")?,
            "UUID" => self.uuid = small()?,
            "SM" => self.sm = small()?,
            "VERSION" => self.version = small()?,
            "ORDER" => self.order = order(value)?,
            "CHECKS" => self.checks = switch()?,
            "MEMORY" => self.memory = number()?,
            "MAPPED" => self.mapped = number()?,
            "MAPPING" => self.mapping = switch()?,
            "GRANULE" => {
                self.granule = number()?;
                if !self.granule.is_power_of_two() || self.granule < 256 {
                    return Err("expected a power of two from 256 on".into());
                }
            }
            "REFUSE_CAPTURES" => self.refuse_captures = number()?,
            "LOSE_AFTER" => self.lose_after = number()?,
            "COUNTS" => self.counts = Some(value.into()),
            _ => return Err("there is no such switch".into()),
        }
        Ok(())
    }

    /// The newest PTX version that the driver reads, times ten ("PTX ISA", release notes).
    pub fn ptx_version(&self) -> u32 {
        const VERSIONS: [(u32, u32); 18] = [
            (12_090, 88),
            (12_080, 87),
            (12_070, 86),
            (12_050, 85),
            (12_040, 84),
            (12_030, 83),
            (12_020, 82),
            (12_010, 81),
            (12_000, 80),
            (11_080, 78),
            (11_070, 77),
            (11_060, 76),
            (11_050, 75),
            (11_040, 74),
            (11_030, 73),
            (11_020, 72),
            (11_010, 71),
            (11_000, 70),
        ];
        VERSIONS.iter().find(|(cuda, _)| self.version >= *cuda).map_or(65, |(_, ptx)| *ptx)
    }
}

fn order(value: &str) -> Result<WarpOrder, String> {
    match (value, value.strip_prefix("random:")) {
        ("turns", _) => Ok(WarpOrder::Turns),
        ("backwards", _) => Ok(WarpOrder::Backwards),
        (_, Some(seed)) => Ok(WarpOrder::Random(seed.parse().map_err(|_| "the seed is no number")?)),
        _ => Err("expected turns, backwards or random:SEED".into()),
    }
}
