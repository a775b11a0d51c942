//! The passes of LLVM for a module. See `docs/design/0033-builds-in-seconds.md` for the cost of each.

use inkwell::values::FunctionValue;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LlvmPipeline {
    /// LLVM's own, for kernels of common size.
    Full,
    /// Passes for kernels of dozens of loops. On those, passes that ask for the trip count of every loop
    /// after each change take most of the time (induction variables, unrolling at run time, which here finds
    /// only loops of prefetches). Loads, vectors and tiles are in such a kernel's text already.
    Large,
    /// Passes for steps: calls in a row, which run once per token.
    Calls,
}

/// Blocks from which on a kernel is large: a loop has three. Below, LLVM's own pipeline takes a tenth of a
/// second or two.
const LARGE: u32 = 150;

const SROA: &str = "sroa<modify-cfg>";
const COMBINE: &str = "instcombine<max-iterations=1;no-use-loop-info;no-verify-fixpoint>";
const SIMPLIFY: &str = "simplifycfg<bonus-inst-threshold=1;switch-range-to-icmp;keep-loops;speculate-blocks;simplify-cond-branch>";
const SINK: &str = "simplifycfg<bonus-inst-threshold=1;switch-range-to-icmp;keep-loops;hoist-common-insts;sink-common-insts;\
                    speculate-blocks;simplify-cond-branch;speculate-unpredictables>";
const LOOPS: &str = "loop-mssa(loop-instsimplify,loop-simplifycfg,licm<no-allowspeculation>,loop-rotate<header-duplication>,\
                     licm<allowspeculation>,simple-loop-unswitch<nontrivial;trivial>)";
const HOIST: &str = "loop-mssa(licm<allowspeculation>)";

impl LlvmPipeline {
    pub fn of_kernel(function: FunctionValue<'_>) -> LlvmPipeline {
        if function.count_basic_blocks() < LARGE { LlvmPipeline::Full } else { LlvmPipeline::Large }
    }

    /// The passes in the form of `opt -passes`.
    pub fn text(self) -> String {
        let passes: &[&str] = match self {
            LlvmPipeline::Full => return "default<O3>".into(),
            LlvmPipeline::Large => &[
                SROA,
                "early-cse<memssa>",
                SIMPLIFY,
                COMBINE,
                "jump-threading",
                "correlated-propagation",
                SIMPLIFY,
                COMBINE,
                "reassociate",
                LOOPS,
                SIMPLIFY,
                COMBINE,
                "loop(loop-unroll-full)",
                SROA,
                "gvn",
                COMBINE,
                HOIST,
                SINK,
                "loop-unroll<O3;no-runtime>",
                COMBINE,
                HOIST,
                SINK,
            ],
            LlvmPipeline::Calls => &["early-cse", COMBINE, "simplifycfg"],
        };
        format!("globaldce,function<eager-inv>({})", passes.join(","))
    }
}
