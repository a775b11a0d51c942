//! A driver with a module, for tests.

use softcuda::driver::streams::QueuedLaunch;
use softcuda::driver::{DriverFailure, DriverResult, SoftDriver};
use softcuda::options::DeviceOptions;

pub const HEADER: &str = ".version 7.8\n.target sm_90\n.address_size 64\n";

/// An argument of a kernel.
pub enum KernelArg<'a> {
    /// A buffer with these words.
    Words(&'a [u32]),
    /// A buffer of this many bytes that are not written.
    Empty(u64),
}

pub struct TestLaunch<'a> {
    pub text: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    pub args: &'a [KernelArg<'a>],
    pub switches: &'a [(&'a str, &'a str)],
}

/// A kernel `k` with pointers `p0`, `p1`, ... in `%rd0`, `%rd1`, ... and registers of all kinds.
pub fn kernel(params: usize, body: &str) -> String {
    let list: Vec<String> = (0..params).map(|i| format!(".param .u64 p{i}")).collect();
    let loads: String = (0..params).map(|i| format!("ld.param.u64 %rd{i}, [p{i}];\n")).collect();
    format!(
        "{HEADER}.visible .entry k({}) {{\n.reg .pred %p<8>;\n.reg .b16 %rs<16>;\n.reg .b32 %r<40>;\n.reg .f32 %f<16>;\n\
         .reg .b64 %rd<24>;\n{loads}{body}\n}}\n",
        list.join(", ")
    )
}

impl<'a> TestLaunch<'a> {
    pub fn new(text: String, threads: u32, args: &'a [KernelArg<'a>]) -> Self {
        Self { text, grid: [1; 3], block: [threads, 1, 1], shared_bytes: 0, args, switches: &[] }
    }

    /// Runs the kernel `k`; words of every buffer afterwards.
    pub fn run(&self) -> DriverResult<Vec<Vec<u32>>> {
        let mut options = DeviceOptions::default();
        for (name, value) in self.switches {
            options.set(name, value).expect("a known switch");
        }
        let mut driver = SoftDriver::new(options);
        driver.initialised = true;
        driver.hold();
        let module = driver.load_module(self.text.as_bytes())?;
        let function = driver.module_function(module, "k")?;
        let mut buffers = vec![];
        for arg in self.args {
            let bytes = match arg {
                KernelArg::Words(words) => words.len() as u64 * 4,
                KernelArg::Empty(bytes) => *bytes,
            };
            let at = driver.space.allocate(bytes)?;
            if let KernelArg::Words(words) = arg {
                let data: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
                driver.space.write(at, &data)?;
            }
            buffers.push((at, bytes));
        }
        let entry = driver.functions.get(function)?.clone();
        let call = QueuedLaunch {
            kernel: entry.kernel,
            constants: entry.constants,
            grid: self.grid,
            block: self.block,
            shared_bytes: self.shared_bytes,
            params: buffers.iter().flat_map(|(at, _)| at.to_le_bytes()).collect(),
        };
        driver.launch(function, 0, call)?;
        driver.wait(0)?;
        buffers
            .iter()
            .map(|(at, bytes)| {
                let mut data = vec![0; *bytes as usize];
                driver.space.read(*at, &mut data)?;
                Ok(data.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect())
            })
            .collect()
    }

    /// Runs the kernel, which has to fail.
    pub fn failure(&self) -> DriverFailure {
        self.run().map(|_| ()).expect_err("it has to fail")
    }
}

/// The word that one thread of `body` stores to `%rd0`, given the words at `%rd1`.
pub fn compute(body: &str, input: &[u32]) -> u32 {
    let text = kernel(2, &format!("{body}\nret;"));
    let args = [KernelArg::Empty(8), KernelArg::Words(input)];
    TestLaunch::new(text, 1, &args).run().unwrap_or_else(|f| panic!("{}\n{body}", f.what))[0][0]
}
