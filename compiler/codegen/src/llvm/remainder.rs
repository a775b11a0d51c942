//! The exact remainder of floats, without `fmodf`: one function per module, called lane by lane.
//!
//! The rest of `|a|` is reduced by the largest `|b| * 2^k` below it until it is less than `|b|`. In f64 no
//! f32 is subnormal, each of these multiples is exact, and so is each difference.

use super::emit::{EmitResult, LlvmBuilder, LlvmValue};
use crate::error::EmitError;
use inkwell::FloatPredicate;
use inkwell::attributes::AttributeLoc;
use inkwell::module::Linkage;
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicValue, FunctionValue, InstructionOpcode as Op};

const NAME: &str = "mlcc.remainder";

impl<'c> LlvmBuilder<'c, '_> {
    /// `a - trunc(a / b) * b`, exactly; for scalars and vectors.
    pub fn float_remainder(&self, a: LlvmValue<'c>, b: LlvmValue<'c>) -> EmitResult<LlvmValue<'c>> {
        let function = match self.module.get_function(NAME) {
            Some(known) => known,
            None => self.define_remainder()?,
        };
        let one = |a, b| {
            let value = self.call(function, &[a, b])?;
            value.ok_or_else(|| EmitError::new("remainder without result"))
        };
        let LlvmValue::VectorValue(vector) = a else { return one(a, b) };
        let mut all = vector;
        for lane in 0..vector.get_type().get_size() {
            let rest = one(self.extract(a, lane)?, self.extract(b, lane)?)?;
            all = self.insert(all, rest, lane)?;
        }
        Ok(all.into())
    }

    fn define_remainder(&self) -> EmitResult<FunctionValue<'c>> {
        let f32 = self.ctx.f32_type();
        let ty = f32.fn_type(&[f32.into(), f32.into()], false);
        let function = self.module.add_function(NAME, ty, Some(Linkage::Internal));
        for name in ["nounwind", "noinline", "noredzone"] {
            function.add_attribute(AttributeLoc::Function, self.flag(name));
        }
        // An emitter of its own: this one is in the middle of another function.
        let inner = LlvmBuilder::new(self.ctx, self.module);
        let [a, b] = function.get_params()[..] else { return Err(EmitError::new("two parameters expected")) };
        inner.remainder_body(function, a, b)?;
        Ok(function)
    }

    fn remainder_body(
        &self,
        function: FunctionValue<'c>,
        a: LlvmValue<'c>,
        b: LlvmValue<'c>,
    ) -> EmitResult<()> {
        let block = |name| self.ctx.append_basic_block(function, name);
        let (entry, header, subtract, done) =
            (block("entry"), block("loop"), block("subtract"), block("done"));
        let f64: BasicTypeEnum<'c> = self.ctx.f64_type().into();
        let i64: BasicTypeEnum<'c> = self.ctx.i64_type().into();
        let number = |v: f64| -> LlvmValue<'c> { self.ctx.f64_type().const_float(v).into() };
        let magnitude = |v| {
            let wide = self.cast(Op::FPExt, v, f64)?;
            self.intrinsic_value("llvm.fabs", &[f64], &[wide])
        };

        self.b.position_at_end(entry);
        let (x, y) = (magnitude(a)?, magnitude(b)?);
        let finite = self.fcmp(FloatPredicate::OLT, x, number(f64::INFINITY))?;
        let positive = self.fcmp(FloatPredicate::OGT, y, number(0.0))?;
        let valid = self.op(Op::And, finite, positive)?;
        let start = self.select(valid, x, number(0.0))?;
        self.b.build_unconditional_branch(header)?;

        self.b.position_at_end(header);
        let phi = self.b.build_phi(self.ctx.f64_type(), "left")?;
        let left = phi.as_basic_value();
        let more = self.fcmp(FloatPredicate::OGE, left, y)?;
        let more = self.op(Op::And, more, valid)?.into_int_value();
        self.b.build_conditional_branch(more, subtract, done)?;

        // The exponent of what is left with the fraction of |b|, halved if that is too much.
        self.b.position_at_end(subtract);
        let exponent = self.op(Op::And, self.bitcast(left, i64)?, self.i64(0x7ff0_0000_0000_0000))?;
        let fraction = self.op(Op::And, self.bitcast(y, i64)?, self.i64(0x000f_ffff_ffff_ffff))?;
        let multiple = self.bitcast(self.op(Op::Or, exponent, fraction)?, f64)?;
        let halved = self.op(Op::FMul, multiple, number(0.5))?;
        let too_much = self.fcmp(FloatPredicate::OGT, multiple, left)?;
        let multiple = self.select(too_much, halved, multiple)?;
        let less = self.op(Op::FSub, left, multiple)?;
        self.b.build_unconditional_branch(header)?;
        phi.add_incoming(&[(&start as &dyn BasicValue<'c>, entry), (&less as &dyn BasicValue<'c>, subtract)]);

        self.b.position_at_end(done);
        let rest = self.cast(Op::FPTrunc, left, a.get_type())?;
        let rest = self.intrinsic_value("llvm.copysign", &[a.get_type()], &[rest, a])?;
        let nan: LlvmValue<'c> = self.ctx.f32_type().const_float(f64::NAN).into();
        let result = self.select(valid, rest, nan)?;
        self.b.build_return(Some(&result))?;
        Ok(())
    }
}
