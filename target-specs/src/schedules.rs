//! Tuning of tensor cores for the kernels of a GPU level: its tune tables, which tuning files change as they
//! do those of CPUs. They are in the `gpu` table of a spec.

use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::spec::{AttentionTile, FeatureLevel, GpuSpec, MatrixTile};
use crate::tune::merge_tables;

/// Most rows or columns of a tile, and most warps along each of them.
const MOST_ROWS: u32 = 512;
const MOST_WARPS: u32 = 16;
/// Most f32 sums of a thread: half of the registers that it may have, so that operands have the others.
const MOST_SUMS: i64 = 128;
/// Registers beside the sums, and all of a block.
const OTHER_REGISTERS: i64 = 32;
const BLOCK_REGISTERS: i64 = 65536;
/// Bytes of a slice of a row (32 columns) of activations and of weights: f32 or f16 with f16; and f16 with
/// 8-bit codes and a scale.
const FLOATS: [[u32; 2]; 2] = [[128, 64], [64, 64]];
const CODES: [[u32; 2]; 1] = [[64, 36]];
const COLUMNS_OF_SLICE: u32 = 32;
const F32_SLICE: u32 = 128;
/// Floats between rows of finished sums.
const PAD: u32 = 8;

/// The tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GpuSchedules {
    #[serde(skip_serializing_if = "Option::is_none")]
    product: Option<MatrixTile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    code_product: Option<MatrixTile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<AttentionTile>,
}

impl GpuSpec {
    pub(crate) fn schedules(&self) -> GpuSchedules {
        let GpuSpec { product, code_product, attention, .. } = *self;
        GpuSchedules { product, code_product, attention }
    }

    /// Shared memory that a block has on every machine that runs code of the level.
    pub fn max_shared_bytes(&self) -> u32 {
        self.opt_in_shared_bytes.unwrap_or(self.shared_bytes)
    }
}

impl GpuSchedules {
    /// The first value with which no kernel can be built, or that no machine of the level runs.
    pub(crate) fn find_fault(&self, gpu: &GpuSpec) -> Option<String> {
        let product = |name: &str, tile: Option<MatrixTile>, slices: &[[u32; 2]]| {
            Some(format!("{name}: {}", tile?.fault(gpu, slices)?))
        };
        product("product", self.product, &FLOATS)
            .or_else(|| product("code_product", self.code_product, &CODES))
            .or_else(|| Some(format!("attention: {}", self.attention?.fault(gpu)?)))
    }

    fn to_table(self) -> Table {
        Table::try_from(self).unwrap_or_default()
    }
}

impl AttentionTile {
    fn fault(&self, gpu: &GpuSpec) -> Option<String> {
        let AttentionTile { warps, keys, shared_bytes } = *self;
        let most = gpu.max_shared_bytes();
        match () {
            // They share the keys of a tile evenly, each at least 16.
            () if !matches!(warps, 1 | 2 | 4 | 8) || 32 * warps > gpu.max_threads => Some(format!(
                "{warps} warps: permitted are 1, 2, 4 and 8, of at most {} threads",
                gpu.max_threads
            )),
            () if !matches!(keys, 16 | 32 | 64) => {
                Some(format!("tiles of {keys} keys: permitted are 16, 32 and 64"))
            }
            () if !(1024..=most).contains(&shared_bytes) => Some(format!(
                "shared_bytes {shared_bytes}: permitted are 1024 to {most}, which every machine of the level has"
            )),
            () => None,
        }
    }
}

impl MatrixTile {
    /// `slices`: bytes of a row of activations and of weights that a stage has, by types.
    fn fault(&self, gpu: &GpuSpec, slices: &[[u32; 2]]) -> Option<String> {
        let MatrixTile { rows, columns, warps: [down, across], stages } = *self;
        let along = |what: &str, size: u32, warps: u32, unit: u32| {
            if !(1..=MOST_WARPS).contains(&warps) {
                return Some(format!("{warps} warps along {what}: permitted are 1 to {MOST_WARPS}"));
            }
            let whole = size > 0 && size <= MOST_ROWS && size.is_multiple_of(warps * unit);
            (!whole).then(|| {
                format!(
                    "{size} {what} are not whole fragments of {unit} for each of {warps} warps: must be a multiple of \
                     {}, at most {MOST_ROWS}",
                    warps * unit
                )
            })
        };
        let of_sizes = along("rows", rows, down, 16).or_else(|| along("columns", columns, across, 8));
        if of_sizes.is_some() {
            return of_sizes;
        }
        let (threads, sums) = (self.threads(), self.lane_accumulators());
        let (shared, most) = (self.shared_bytes(slices), gpu.max_shared_bytes());
        match () {
            () if threads > gpu.max_threads => Some(format!(
                "{down} x {across} warps are {threads} threads: at most {} are permitted",
                gpu.max_threads
            )),
            () if !(2..=8).contains(&stages) => Some(format!("{stages} stages: permitted are 2 to 8")),
            () if sums > MOST_SUMS || i64::from(threads) * (sums + OTHER_REGISTERS) > BLOCK_REGISTERS => {
                let most = MOST_SUMS.min(BLOCK_REGISTERS / i64::from(threads) - OTHER_REGISTERS);
                Some(format!(
                    "{rows} x {columns} results of {down} x {across} warps are {sums} sums of each thread: registers have room \
                     for {most}, so take fewer rows or columns, or more warps"
                ))
            }
            () if shared > most => Some(format!(
                "{rows} rows, {columns} columns and {stages} stages take {shared} bytes of shared memory: machines of the level \
                 have {most}, so take fewer of them"
            )),
            () => None,
        }
    }

    /// Shared memory of a block: the stages, and finished sums where they do not fit into those of
    /// activations.
    fn shared_bytes(&self, slices: &[[u32; 2]]) -> u32 {
        let MatrixTile { rows, columns, warps, stages } = *self;
        let pitch = columns / warps[1] + PAD;
        let of = |&[x, w]: &[u32; 2]| {
            let fits = x == F32_SLICE && stages * COLUMNS_OF_SLICE >= pitch;
            stages * (rows * x + columns * w) + if fits { 0 } else { rows * pitch * 4 }
        };
        slices.iter().map(of).max().unwrap_or(0)
    }
}

impl FeatureLevel {
    /// Its tune tables; none where there is nothing to tune (GPUs without tensor cores that kernels use).
    pub fn tune_tables(&self) -> Option<Table> {
        match (&self.tune, &self.gpu) {
            (Some(tune), _) => Some(tune.to_table()),
            (None, Some(gpu)) => Some(gpu.schedules().to_table()).filter(|tables| !tables.is_empty()),
            (None, None) => None,
        }
    }

    /// The level with these keys over those of its schedules.
    pub(crate) fn with_schedules(&self, gpu: &GpuSpec, mut changes: Table) -> Result<FeatureLevel, String> {
        let base = gpu.schedules().to_table();
        if base.is_empty() {
            return Err("the level has none: its kernels use no tensor cores".into());
        }
        // Without a tile of its own, packed weights have that of the others.
        if let Some(Value::Table(own)) = changes.get_mut("code_product")
            && !base.contains_key("code_product")
            && let Some(Value::Table(product)) = base.get("product")
        {
            let whole = product.clone().into_iter().chain(std::mem::take(own)).collect();
            *own = whole;
        }
        let read: Result<GpuSchedules, toml::de::Error> = merge_tables(&base, changes).try_into();
        let schedules = read.map_err(|e| e.to_string().trim_end().to_string())?;
        if let Some(fault) = schedules.find_fault(gpu) {
            return Err(fault);
        }
        let GpuSchedules { product, code_product, attention } = schedules;
        let gpu = GpuSpec { product, code_product, attention, ..gpu.clone() };
        Ok(FeatureLevel { gpu: Some(gpu), ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use crate::{TargetSpec, resolve_target};

    /// The fault of a level that has this in its `gpu` table.
    fn fault(schedule: &str, threads: u32) -> String {
        let device = "device = { name = 'd', sms = 1, registers = 1, shared_bytes = 1, l2_bytes = 1, gbytes_per_s = 1, \
                      f32_gflops = 1, f16_gflops = 1 }";
        let gpu = format!(
            "gpu = {{ sm = 80, ptx = 70, shared_bytes = 49152, opt_in_shared_bytes = 101376, max_threads = {threads}, {schedule}, {device} }}"
        );
        let head = "name = 'g'\narch = 'nvptx'\ntriple = 't'\ndefault = ['x']\n";
        let text = format!("{head}[[level]]\nname = 'x'\nllvm_cpu = 'sm_80'\nvector_bits = 128\n{gpu}\n");
        TargetSpec::parse("g", &text).map_or_else(|e| e.to_string(), |_| String::new())
    }

    #[test]
    fn tiles_of_products_can_be_built() {
        let of = |name: &str, product: &str, threads| fault(&format!("{name} = {{ {product} }}"), threads);
        assert_eq!(of("product", "rows = 32, columns = 16, warps = [2, 1], stages = 2", 64), "");
        for (wrong, parts) in [
            (
                "rows = 40, columns = 16, warps = [2, 1], stages = 2",
                ["`x`: product: 40 rows are not whole", "of 32"],
            ),
            ("rows = 32, columns = 12, warps = [2, 1], stages = 2", ["12 columns are not whole", "of 8"]),
            ("rows = 1024, columns = 16, warps = [2, 1], stages = 2", ["1024 rows", "at most 512"]),
            ("rows = 64, columns = 16, warps = [4, 1], stages = 2", ["128 threads", "64"]),
            ("rows = 32, columns = 16, warps = [2, 1], stages = 1", ["1 stages", "2 to 8"]),
            ("rows = 32, columns = 16, warps = [0, 1], stages = 2", ["0 warps along rows", "1 to 16"]),
            ("rows = 16, columns = 16, warps = [4294967295, 1], stages = 2", ["4294967295 warps", "1 to 16"]),
            ("rows = 128, columns = 256, warps = [1, 2], stages = 2", ["512 sums", "room for 128"]),
        ] {
            let text = of("product", wrong, 64);
            assert!(parts.iter().all(|part| text.contains(part)), "{wrong}: {text}");
        }
        let text = of("product", "rows = 256, columns = 256, warps = [4, 8], stages = 2", 1024);
        assert!(text.contains("64 sums") && text.contains("room for 32"), "{text}");
        let text = of("code_product", "rows = 256, columns = 128, warps = [4, 2], stages = 5", 1024);
        assert!(text.contains("code_product: 256 rows") && text.contains("101376"), "{text}");
    }

    #[test]
    fn tiles_of_attention_are_pages_or_parts() {
        let of = |attention: &str| fault(&format!("attention = {{ {attention} }}"), 128);
        assert_eq!(of("warps = 4, keys = 32, shared_bytes = 1024"), "");
        for (wrong, part) in [
            ("warps = 8, keys = 32, shared_bytes = 1024", "`x`: attention: 8 warps"),
            ("warps = 3, keys = 32, shared_bytes = 1024", "1, 2, 4 and 8"),
            ("warps = 0, keys = 32, shared_bytes = 1024", "0 warps"),
            ("warps = 4, keys = 48, shared_bytes = 1024", "16, 32 and 64"),
            ("warps = 4, keys = 32, shared_bytes = 101377", "1024 to 101376"),
        ] {
            assert!(of(wrong).contains(part), "{wrong}: {}", of(wrong));
        }
    }

    #[test]
    fn schedules_are_changed_key_by_key() {
        let change = |text: &str| toml::from_str::<toml::Table>(text).unwrap();
        let level = resolve_target("sm_80").unwrap().levels.remove(0);
        let tuned =
            level.with_changes(&change("product = { rows = 128 }\nattention = { warps = 8 }")).unwrap();
        let (before, after) = (level.gpu.clone().unwrap(), tuned.gpu.clone().unwrap());
        let (old, new) = (before.product.unwrap(), after.product.unwrap());
        assert_eq!((new.rows, new.columns, new.stages), (128, old.columns, old.stages));
        assert_eq!(after.attention.unwrap().warps, 8);
        assert_eq!((after.code_product, &after.device), (None, &before.device));
        // It has no such tile of its own.
        let tuned = level.with_changes(&change("code_product = { stages = 2 }")).unwrap();
        let of_codes = tuned.gpu.unwrap().code_product.unwrap();
        assert_eq!((of_codes.rows, of_codes.stages), (old.rows, 2));
        for (wrong, part) in [
            ("product = { rows = 100 }", "product: 100 rows"),
            ("product = { speed = 1 }", "`speed`"),
            ("product = { rows = -1 }", "-1"),
            ("product = { warps = [1] }", "2"),
            ("product = 3", "product"),
            ("stream = {}", "`stream`"),
        ] {
            let text = level.with_changes(&change(wrong)).unwrap_err();
            assert!(text.contains(part), "{wrong}: {text}");
        }
        let old = resolve_target("sm_70").unwrap().levels.remove(0);
        assert!(
            old.with_changes(&change("product = { rows = 64 }")).unwrap_err().contains("no tensor cores")
        );
    }
}
