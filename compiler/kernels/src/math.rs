//! For generators that are still written against the builder.

use mlcc_ir::builder::KernelBuilder;
use mlcc_ir::kernel::ExprId;
use mlcc_kernel_lang::{Recorder, math};

/// [`math::exp2_below_zero`].
pub(crate) fn exp2_below_zero(kb: &mut KernelBuilder, x: ExprId) -> ExprId {
    Recorder::within(kb, |k| math::exp2_below_zero(k.val(x)).id())
}
