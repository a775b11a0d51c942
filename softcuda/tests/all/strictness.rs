//! Unknown constructs are refused when a module is loaded.

use crate::machine::{HEADER, kernel};
use softcuda::driver::{SoftDriver, Status};
use softcuda::options::DeviceOptions;
use softcuda::ptx::kernel::load;

fn refused(body: &str, part: &str) {
    let error = load(&kernel(1, body)).expect_err("it has to be refused").to_string();
    assert!(error.contains(part), "{part:?} is not in: {error}");
}

#[test]
fn unknown_instructions_and_modifiers_are_named() {
    refused(
        "ret;\nwgmma.fence.sync.aligned;",
        "line 12: kernel k: unknown instruction `wgmma.fence.sync.aligned`",
    );
    refused("add.rz.f32 %f0, %f1, %f2;", "unknown modifier .rz of `add.rz.f32`");
    refused("ld.global.f64 %rd3, [%rd0];\nadd.f64 %rd1, %rd1, %rd1;", "unknown instruction `add.f64`");
    refused("ld.const.u32 %r0, [%rd0];", "a state space that this driver does not know");
    refused("mov.u32 %r0, %clock;", "%clock");
    refused("cvt.f32.s32 %f0, %r0;", "it has to be rounded");
    refused("cvt.rn.f32.f16 %f0, %rs0;", "it takes no rounding");
    refused("cvt.rn.s32.f32 %r0, %f0;", "a float becomes an integer by");
    refused("mul.s32 %r0, %r0, %r0;", "lacks .lo, .hi or .wide");
}

#[test]
fn operands_have_to_fit() {
    refused("add.s32 %r0, %r1;", "with 2 operands, it takes 3");
    refused("add.s32 %r0, %rd0, 1;", "%rd0 has not the size of the instruction");
    refused("add.s32 %r0, %r99, 1;", "%r99 is not declared");
    refused("add.s64 %r0, %rd1, 1;", "has not the size");
    refused("bra NOWHERE;", "there is no label NOWHERE");
    refused("ld.param.u64 %rd0, [p7];", "p7 is no parameter");
    refused("ld.global.v4.u64 {%rd0, %rd1, %rd2, %rd3}, [%rd0];", "wider than 16 bytes");
    refused("ld.global.u64 %r0, [%rd0];", "is too narrow");
    refused("setp.lt.b32 %p0, %r0, %r1;", "does not fit its type");
    refused("A:\nA:\nret;", "label A stands twice");
}

#[test]
fn modules_are_refused_as_a_driver_refuses_them() {
    let status = |text: &str, switches: &[(&str, &str)]| {
        let mut options = DeviceOptions::default();
        for (name, value) in switches {
            options.set(name, value).unwrap();
        }
        SoftDriver::new(options)
            .load_module(text.as_bytes())
            .map_or_else(|f| (f.status, f.what), |_| (Status::Success, String::new()))
    };
    let text = kernel(0, "ret;");
    assert_eq!(status(&text, &[]).0, Status::Success);
    assert_eq!(
        status(&text, &[("SM", "80")]),
        (Status::NoBinaryForGpu, "the text is for sm_90, the device is an sm_80".into())
    );
    let old = status(&text, &[("VERSION", "11040")]);
    assert_eq!(old.0, Status::UnsupportedPtxVersion);
    assert!(old.1.contains("PTX 7.8, this driver reads up to 7.4"), "{}", old.1);
    let exact = text.replace("sm_90", "sm_90a");
    assert_eq!(status(&exact, &[("SM", "100")]).0, Status::NoBinaryForGpu);
    assert_eq!(status(&exact, &[]).0, Status::Success);
    assert_eq!(status("\u{7f}ELF", &[]).0, Status::NoBinaryForGpu);
    for cut in [HEADER.len() / 2, HEADER.len() + 20, text.len() - 3] {
        assert_eq!(status(&text[..cut], &[]).0, Status::InvalidPtx, "{}", &text[..cut]);
    }
    assert_eq!(status("", &[]).0, Status::InvalidPtx);
}

#[test]
fn switches_are_checked() {
    let mut options = DeviceOptions::default();
    assert!(options.set("NOTHING", "1").unwrap_err().contains("no such switch"));
    assert!(options.set("ORDER", "sideways").unwrap_err().contains("random:SEED"));
    assert!(options.set("CHECKS", "1").unwrap_err().contains("on or off"));
    assert!(options.set("GRANULE", "1000").unwrap_err().contains("power of two"));
}
