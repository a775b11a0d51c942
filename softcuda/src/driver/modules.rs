//! Modules and their functions.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{DriverResult, SoftDriver, Status, fail};
use crate::exec::registers::ConstantBank;
use crate::ptx::kernel::{PtxKernel, load};

/// Shared memory that a launch may ask for without [`SoftDriver::function_shared`].
const PLAIN_SHARED: u32 = 48 << 10;

#[derive(Default)]
pub struct FunctionTable {
    modules: BTreeMap<u64, Vec<Arc<PtxKernel>>>,
    functions: BTreeMap<u64, LoadedFunction>,
    next: u64,
}

#[derive(Clone)]
pub struct LoadedFunction {
    module: u64,
    pub kernel: Arc<PtxKernel>,
    pub constants: Arc<ConstantBank>,
    pub most_shared: u32,
    /// It was launched before. A driver loads a function then, and cannot do so while a stream records.
    pub loaded: bool,
}

/// Handles of modules and functions begin here, so that no other handle is taken for one.
const FIRST: u64 = 0x5c01_0000;

impl FunctionTable {
    fn next(&mut self) -> u64 {
        self.next += 1;
        FIRST + self.next * 16
    }

    pub fn get(&mut self, handle: u64) -> DriverResult<&mut LoadedFunction> {
        match self.functions.get_mut(&handle) {
            Some(function) => Ok(function),
            None => fail(Status::InvalidHandle, "no such function"),
        }
    }
}

impl SoftDriver {
    /// Most shared memory that a block of this device can have.
    pub fn most_shared(&self) -> u32 {
        match self.options.sm {
            0..=69 => 48 << 10,
            70..=74 => 96 << 10,
            75..=79 => 64 << 10,
            80 | 87 => 163 << 10,
            86 | 89 | 120.. => 99 << 10,
            _ => 227 << 10,
        }
    }

    pub fn load_module(&mut self, image: &[u8]) -> DriverResult<u64> {
        if image.starts_with(b"\x7fELF") {
            return fail(Status::NoBinaryForGpu, "the image is machine code; this driver executes PTX only");
        }
        let Ok(text) = std::str::from_utf8(image) else {
            return fail(Status::InvalidImage, "the image is no text");
        };
        let program = match load(text) {
            Ok(program) => program,
            Err(error) => return fail(Status::InvalidPtx, format!("PTX {error}")),
        };
        let (newest, version) = (self.options.ptx_version(), program.version);
        if version > newest {
            let show = |v: u32| format!("{}.{}", v / 10, v % 10);
            let what = format!("the text is PTX {}, this driver reads up to {}", show(version), show(newest));
            return fail(Status::UnsupportedPtxVersion, what);
        }
        let sm = self.options.sm;
        if program.sm > sm || program.exact && program.sm != sm {
            return fail(
                Status::NoBinaryForGpu,
                format!("the text is for sm_{}, the device is an sm_{sm}", program.sm),
            );
        }
        let handle = self.functions.next();
        self.functions.modules.insert(handle, program.kernels);
        Ok(handle)
    }

    pub fn unload_module(&mut self, module: u64) -> DriverResult<()> {
        if self.functions.modules.remove(&module).is_none() {
            return fail(Status::InvalidHandle, "no such module");
        }
        self.functions.functions.retain(|_, f| f.module != module);
        Ok(())
    }

    pub fn module_function(&mut self, module: u64, name: &str) -> DriverResult<u64> {
        let Some(kernels) = self.functions.modules.get(&module) else {
            return fail(Status::InvalidHandle, "no such module");
        };
        let Some(kernel) = kernels.iter().find(|k| k.name == name).map(Arc::clone) else {
            return fail(Status::NotFound, format!("the module has no kernel {name}"));
        };
        let constants = Arc::new(ConstantBank::of(&kernel));
        let handle = self.functions.next();
        let function = LoadedFunction { module, kernel, constants, most_shared: PLAIN_SHARED, loaded: false };
        self.functions.functions.insert(handle, function);
        Ok(handle)
    }

    /// Permits a function `bytes` bytes of dynamic shared memory.
    pub fn function_shared(&mut self, function: u64, bytes: u32) -> DriverResult<()> {
        let most = self.most_shared();
        if bytes > most {
            return fail(
                Status::InvalidValue,
                format!("{bytes} bytes of shared memory, a block has at most {most}"),
            );
        }
        self.functions.get(function)?.most_shared = bytes;
        Ok(())
    }
}
