//! The choice of an artifact's image for a GPU.

use std::cmp::Reverse;

use mlcc_abi::device_scope;

use crate::table::GpuImage;
use crate::{Error, Result};

/// Compute capabilities (times ten) whose family-specific features are the same, earliest first: "CUDA C++
/// Programming Guide", "Family-Specific Compilation Targets". Others are alone in their family.
const FAMILIES: [&[u32]; 2] = [&[100, 103], &[120, 121]];

/// The images that a GPU of compute capability `sm / 10` can run, best first: cubins before PTX, which the
/// driver has to translate; of these the one for the latest device, and for that the one that may use most of
/// it.
pub(super) fn fitting_images(images: &[GpuImage], sm: u32) -> Vec<&GpuImage> {
    let rank = |image: &&GpuImage| Reverse((is_cubin(image), image.sm, specific(image.scope)));
    let mut fitting: Vec<&GpuImage> = images.iter().filter(|image| runs_on(image, sm)).collect();
    fitting.sort_by_key(rank);
    fitting
}

/// Loads the first image that the driver takes: machine code may be that of a newer assembler than it knows,
/// which its PTX is not. What it says of the first PTX is final. `None` if there is none.
pub(super) fn load_first<T>(
    images: &[&GpuImage],
    load: impl Fn(&GpuImage) -> Result<T>,
) -> Option<Result<T>> {
    let mut loaded = None;
    for image in images {
        match load(image) {
            Err(error @ Error::Driver { .. }) if is_cubin(image) => loaded = loaded.or(Some(Err(error))),
            of_driver => return Some(of_driver),
        }
    }
    loaded
}

fn is_cubin(image: &GpuImage) -> bool {
    image.kind == "cubin"
}

/// An image as messages name it: `ptx for sm_90a`.
pub(super) fn describe(image: &GpuImage) -> String {
    let suffix = match image.scope {
        device_scope::EXACT => "a",
        device_scope::FAMILY => "f",
        _ => "",
    };
    format!("{} for sm_{}{suffix}", image.kind, image.sm)
}

fn runs_on(image: &GpuImage, sm: u32) -> bool {
    let made_for = image.sm;
    match (image.kind.as_str(), image.scope) {
        ("ptx", device_scope::LATER) => made_for <= sm,
        ("cubin", device_scope::LATER) => made_for <= sm && made_for / 10 == sm / 10,
        ("ptx" | "cubin", device_scope::EXACT) => made_for == sm,
        ("ptx" | "cubin", device_scope::FAMILY) => {
            let family = FAMILIES.iter().find(|family| family.contains(&made_for));
            made_for == sm || made_for < sm && family.is_some_and(|family| family.contains(&sm))
        }
        // From a later compiler.
        _ => false,
    }
}

fn specific(scope: u32) -> u32 {
    match scope {
        device_scope::EXACT => 2,
        device_scope::FAMILY => 1,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cubin sm_90a` and the like.
    fn image(text: &str) -> GpuImage {
        let (kind, name) = text.split_once(" sm_").unwrap();
        let scope = match name.chars().last() {
            Some('a') => device_scope::EXACT,
            Some('f') => device_scope::FAMILY,
            _ => device_scope::LATER,
        };
        let sm = name.trim_end_matches(['a', 'f']).parse().unwrap();
        GpuImage { kind: kind.into(), sm, scope, bytes: vec![0] }
    }

    /// The image that a GPU gets, of some images.
    const TABLE: &[(&[&str], u32, Option<&str>)] = &[
        (&["ptx sm_70", "ptx sm_80", "ptx sm_90"], 75, Some("ptx sm_70")),
        (&["ptx sm_70", "ptx sm_80", "ptx sm_90"], 80, Some("ptx sm_80")),
        (&["ptx sm_70", "ptx sm_80", "ptx sm_90"], 120, Some("ptx sm_90")),
        (&["ptx sm_70", "ptx sm_80", "ptx sm_90"], 60, None),
        // A cubin runs on its major version only, and not on earlier devices.
        (&["ptx sm_70", "cubin sm_80"], 86, Some("cubin sm_80")),
        (&["ptx sm_70", "cubin sm_86"], 80, Some("ptx sm_70")),
        (&["ptx sm_70", "cubin sm_80"], 90, Some("ptx sm_70")),
        (&["cubin sm_80"], 90, None),
        // Architecture-specific code runs on one device.
        (&["ptx sm_90a", "ptx sm_80"], 90, Some("ptx sm_90a")),
        (&["ptx sm_90", "ptx sm_90a"], 90, Some("ptx sm_90a")),
        (&["ptx sm_90a", "ptx sm_90"], 100, Some("ptx sm_90")),
        (&["ptx sm_90a", "ptx sm_80"], 100, Some("ptx sm_80")),
        (&["ptx sm_90a"], 100, None),
        (&["ptx sm_90a", "cubin sm_90a"], 120, None),
        (&["cubin sm_90", "cubin sm_90a"], 90, Some("cubin sm_90a")),
        (&["cubin sm_100a", "ptx sm_90"], 103, Some("ptx sm_90")),
        // Family-specific code runs on the later ones of its family.
        (&["ptx sm_100f", "ptx sm_90"], 100, Some("ptx sm_100f")),
        (&["ptx sm_100f", "ptx sm_90"], 103, Some("ptx sm_100f")),
        (&["ptx sm_100f", "ptx sm_100a"], 100, Some("ptx sm_100a")),
        (&["ptx sm_100f", "ptx sm_90"], 120, Some("ptx sm_90")),
        (&["ptx sm_103f", "ptx sm_90"], 100, Some("ptx sm_90")),
        (&["cubin sm_120f", "ptx sm_90"], 121, Some("cubin sm_120f")),
        (&["ptx sm_110f"], 110, Some("ptx sm_110f")),
        (&["ptx sm_110f"], 120, None),
        (&["fatbin sm_90"], 90, None),
    ];

    #[test]
    fn every_gpu_gets_what_it_can_run() {
        for (names, sm, expected) in TABLE {
            let images: Vec<GpuImage> = names.iter().map(|n| image(n)).collect();
            let found = fitting_images(&images, *sm).first().map(|i| describe(i).replace(" for", ""));
            assert_eq!(found.as_deref(), *expected, "sm_{sm} of {names:?}");
        }
    }

    #[test]
    fn an_image_of_an_unknown_scope_is_not_taken() {
        assert!(fitting_images(&[GpuImage { scope: 3, ..image("ptx sm_80") }], 80).is_empty());
    }

    #[test]
    fn ptx_is_loaded_where_a_driver_takes_no_cubin() {
        let images: Vec<GpuImage> =
            ["ptx sm_80", "cubin sm_80", "cubin sm_86", "ptx sm_86"].map(image).into();
        let fitting = fitting_images(&images, 86);
        let names = |images: &[&GpuImage]| images.iter().map(|i| describe(i)).collect::<Vec<_>>();
        let all = ["cubin for sm_86", "cubin for sm_80", "ptx for sm_86", "ptx for sm_80"];
        assert_eq!(names(&fitting), all);
        let refused = |image: &GpuImage| Error::Driver { call: "load", what: describe(image) };
        let taking = |kind: &'static str| {
            move |image: &GpuImage| if image.kind == kind { Ok(describe(image)) } else { Err(refused(image)) }
        };
        let of = |images: &[&GpuImage], kind| {
            load_first(images, taking(kind)).map(|r| r.map_err(|e| e.to_string()))
        };
        assert_eq!(of(&fitting, "cubin"), Some(Ok("cubin for sm_86".into())));
        assert_eq!(of(&fitting, "ptx"), Some(Ok("ptx for sm_86".into())));
        let error = of(&fitting, "").unwrap().unwrap_err();
        assert!(error.contains("ptx for sm_86"), "{error}");
        // Without PTX it is the best cubin that counts.
        let error = of(&fitting[..2], "").unwrap().unwrap_err();
        assert!(error.contains("cubin for sm_86"), "{error}");
        assert_eq!(of(&[], ""), None);
        let no_memory = load_first(&fitting, |_| Err::<(), _>(Error::OutOfMemory { what: "code", bytes: 1 }));
        assert!(matches!(no_memory, Some(Err(Error::OutOfMemory { .. }))));
    }
}
