//! Lane permutations as byte shuffles of 128-bit vectors.

use super::emit::ClifKernelEmitter;
use super::value::{ClifValue, LaneForm};
use cranelift_codegen::ir::{InstBuilder, Type, Value, types};
use mlcc_ir::kernel::ExprType;
use mlcc_ir::types::DType;

impl ClifKernelEmitter<'_, '_> {
    /// `lanes` picked from `a` followed by `b`, both of type `from`.
    pub fn shuffle(
        &mut self,
        a: &ClifValue,
        b: Option<&ClifValue>,
        from: ExprType,
        lanes: &[u32],
    ) -> ClifValue {
        let mut parts = a.parts.clone();
        let source = match (from.dtype, b) {
            (DType::Bool, Some(b)) => {
                let (form, vals) = self.same_masks(&[a, b]);
                parts = vals.into_iter().flat_map(|v| v.parts).collect();
                form
            }
            _ => {
                parts.extend(b.into_iter().flat_map(|b| b.parts.iter().copied()));
                a.form
            }
        };
        let form = match (from.dtype, source) {
            (DType::Bool, LaneForm::Vectors(ty)) if lanes.len().is_multiple_of(ty.lane_count() as usize) => {
                source
            }
            (DType::Bool, _) => LaneForm::Scalars,
            (dtype, _) => self.form(ExprType::vector(dtype, lanes.len() as u32)),
        };
        match (source, form) {
            (LaneForm::Vectors(ty), LaneForm::Vectors(_)) => {
                let per_part = ty.lane_count() as usize;
                let parts = lanes.chunks(per_part).map(|picked| self.pick(ty, &parts, picked)).collect();
                ClifValue::new(form, parts)
            }
            _ => {
                let all = ClifValue::new(source, parts);
                let picked = match source {
                    LaneForm::Scalars => lanes.iter().map(|&l| all.parts[l as usize]).collect(),
                    LaneForm::Vectors(ty) => self.extract(ty, &all, from, lanes),
                };
                self.assemble(form, picked)
            }
        }
    }

    fn extract(&mut self, ty: Type, all: &ClifValue, from: ExprType, lanes: &[u32]) -> Vec<Value> {
        let n = ty.lane_count();
        let mut out = Vec::with_capacity(lanes.len());
        for &lane in lanes {
            let part = all.parts[(lane / n) as usize];
            let value = self.fb.ins().extractlane(part, (lane % n) as u8);
            out.push(match from.dtype {
                DType::Bool => {
                    let low =
                        if ty == types::I8X16 { value } else { self.fb.ins().ireduce(types::I8, value) };
                    self.fb.ins().band_imm_s(low, 1)
                }
                _ => value,
            });
        }
        out
    }

    /// One vector whose lanes are `picked` from the lanes of `parts`: each further source vector is merged
    /// into the result so far.
    fn pick(&mut self, ty: Type, parts: &[Value], picked: &[u32]) -> Value {
        let n = ty.lane_count();
        let mut sources: Vec<u32> = picked.iter().map(|lane| lane / n).collect();
        sources.sort_unstable();
        sources.dedup();
        let first = sources[0];
        let identity = picked.iter().enumerate().all(|(i, &lane)| lane == first * n + i as u32);
        if identity {
            return parts[first as usize];
        }
        let bytes = |lane: u32| {
            let width = ty.lane_type().bytes();
            (0..width).map(move |b| (lane * width + b) as u8)
        };
        let mut result = self.as_type(parts[first as usize], types::I8X16);
        let rest: Vec<Option<u32>> = match sources.len() {
            1 => vec![None],
            _ => sources[1..].iter().copied().map(Some).collect(),
        };
        let mut placed = vec![false; picked.len()];
        for (step, other) in rest.into_iter().enumerate() {
            let mut mask = Vec::with_capacity(16);
            for (i, &lane) in picked.iter().enumerate() {
                let (source, within) = (lane / n, lane % n);
                if step == 0 && source == first {
                    mask.extend(bytes(within));
                    placed[i] = true;
                } else if other == Some(source) {
                    mask.extend(bytes(n + within));
                    placed[i] = true;
                } else {
                    // Keep what was placed; a lane still to come may hold anything.
                    mask.extend(bytes(i as u32));
                }
            }
            let second = match other {
                Some(source) => self.as_type(parts[source as usize], types::I8X16),
                None => result,
            };
            let mask = self.fb.func.dfg.immediates.push(mask.into());
            result = self.fb.ins().shuffle(result, second, mask);
        }
        debug_assert!(placed.iter().all(|&p| p));
        self.as_type(result, ty)
    }
}
