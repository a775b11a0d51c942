//! Units that are compiled separately: every kernel and every step of every level.

use crate::error::CodegenError;
use crate::model::{FixedArguments, LevelInput, fixed_arguments, kernel_symbol, state_step};
use crate::objects::{ObjectKey, ObjectStore, with_symbols};
use crate::table::StateDesc;
use mlcc_ir::kernel::Kernel;
use mlcc_ir::step::{StepItem, StepProgram};
use mlcc_target::FeatureLevel;
use std::collections::BTreeMap;

/// One object file.
pub enum ObjectUnit<'a> {
    Kernel {
        level: &'a FeatureLevel,
        kernel: &'a Kernel,
        #[cfg_attr(not(feature = "llvm"), allow(dead_code, reason = "Cranelift specialises nothing"))]
        fixed: &'a FixedArguments,
    },
    Step {
        level: &'a FeatureLevel,
        step: &'a StepProgram,
        kernels: &'a KernelTable<'a>,
    },
}

impl ObjectUnit<'_> {
    /// A measure of the time that it takes.
    fn cost_estimate(&self) -> usize {
        match self {
            ObjectUnit::Kernel { kernel, .. } => kernel.exprs.len(),
            ObjectUnit::Step { step, .. } => 8 * step.items.len(),
        }
    }
}

/// A back end.
pub trait CodeGenerator: Sync {
    /// Makes sure that the unit's object is among `objects`; returns its key there. A kernel's function is
    /// called [`KERNEL_SYMBOL`](crate::objects::KERNEL_SYMBOL) in it.
    fn object(&self, unit: &ObjectUnit<'_>, objects: &ObjectStore<'_>) -> Result<ObjectKey, CodegenError>;
}

/// Kernels by name.
pub struct KernelTable<'a>(BTreeMap<&'a str, &'a Kernel>);

impl<'a> KernelTable<'a> {
    /// The kernels that a step launches, in the order of their names.
    pub fn launched_by(&self, step: &StepProgram) -> BTreeMap<&'a str, &'a Kernel> {
        let launches = step.items.iter().filter_map(StepItem::launch);
        let named = launches.filter_map(|launch| self.0.get_key_value(launch.kernel.as_str()));
        named.map(|(name, kernel)| (*name, *kernel)).collect()
    }
}

/// Kernels and step that initialise the state.
pub struct StateUnits {
    kernels: Vec<Kernel>,
    step: StepProgram,
}

impl StateUnits {
    pub fn new(states: &[StateDesc]) -> Result<StateUnits, CodegenError> {
        let (kernels, step) = state_step(states)?;
        Ok(StateUnits { kernels, step })
    }
}

/// Everything of one level.
pub struct LevelUnits<'a> {
    pub level: &'a FeatureLevel,
    kernels: Vec<(&'a Kernel, FixedArguments)>,
    steps: Vec<&'a StepProgram>,
    callees: KernelTable<'a>,
}

impl<'a> LevelUnits<'a> {
    pub fn new(input: &LevelInput<'a>, state: &'a StateUnits) -> Result<LevelUnits<'a>, CodegenError> {
        let steps: Vec<&StepProgram> = input.steps.iter().chain([&state.step]).collect();
        let mut fixed = fixed_arguments(steps.iter().copied());
        let mut callees = BTreeMap::new();
        let mut kernels = Vec::new();
        for kernel in input.kernels.iter().chain(&state.kernels) {
            if callees.insert(kernel.name.as_str(), kernel).is_some() {
                let what = "two kernels have this name".into();
                return Err(CodegenError::Internal { kernel: kernel.name.clone(), what });
            }
            kernels.push((kernel, fixed.remove(kernel.name.as_str()).unwrap_or_default()));
        }
        Ok(LevelUnits { level: input.level, kernels, steps, callees: KernelTable(callees) })
    }

    /// Kernels, then steps.
    pub fn units(&self) -> Vec<ObjectUnit<'_>> {
        let kernels = self.kernels.iter();
        let kernels = kernels.map(|(kernel, fixed)| ObjectUnit::Kernel { level: self.level, kernel, fixed });
        let steps = self.steps.iter();
        let steps = steps.map(|step| ObjectUnit::Step { level: self.level, step, kernels: &self.callees });
        kernels.chain(steps).collect()
    }
}

/// Numbers of the units, those first that take long.
pub fn largest_first(units: &[ObjectUnit<'_>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..units.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(units[i].cost_estimate()));
    order
}

/// Objects of all levels, in an order that depends on the input alone. Equal kernels are compiled once, with
/// a symbol for each of them.
pub fn compile_units(
    levels: &[LevelUnits<'_>],
    generator: &impl CodeGenerator,
    threads: usize,
    objects: &ObjectStore<'_>,
) -> Result<Vec<Vec<u8>>, CodegenError> {
    let units: Vec<ObjectUnit<'_>> = levels.iter().flat_map(LevelUnits::units).collect();
    let keys = objects.run(threads, &largest_first(&units), |i| generator.object(&units[i], objects))?;
    let mut symbols: BTreeMap<ObjectKey, Vec<String>> = BTreeMap::new();
    let mut order = Vec::new();
    for (unit, key) in units.iter().zip(&keys) {
        let names = symbols.entry(*key).or_insert_with(|| {
            order.push(*key);
            Vec::new()
        });
        if let ObjectUnit::Kernel { level, kernel, .. } = unit {
            names.push(kernel_symbol(&kernel.name, &level.name));
        }
    }
    let finished = |key: &ObjectKey| {
        let object = objects.get(key);
        match symbols[key].as_slice() {
            [] => Ok(object),
            names => with_symbols(&object, names),
        }
    };
    order.iter().map(finished).collect()
}
