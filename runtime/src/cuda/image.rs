//! Which image of an artifact a GPU gets.

use mlcc_abi::device_scope;

use crate::table::Image;

/// Compute capabilities (times ten) whose family-specific features are the same, earliest first: "CUDA C++ Programming
/// Guide", "Family-Specific Compilation Targets". Others are alone in their family.
const FAMILIES: [&[u32]; 2] = [&[100, 103], &[120, 121]];

/// The best image for a GPU of compute capability `sm / 10`: a cubin before PTX, which the driver has to translate; of
/// these the one for the latest device, and for that the one that may use most of it.
pub(super) fn choose(images: &[Image], sm: u32) -> Option<&Image> {
    let rank = |image: &&Image| (image.kind == "cubin", image.sm, specific(image.scope));
    images.iter().filter(|image| runs_on(image, sm)).max_by_key(rank)
}

/// An image as messages name it: `ptx for sm_90a`.
pub(super) fn describe(image: &Image) -> String {
    let suffix = match image.scope {
        device_scope::EXACT => "a",
        device_scope::FAMILY => "f",
        _ => "",
    };
    format!("{} for sm_{}{suffix}", image.kind, image.sm)
}

fn runs_on(image: &Image, sm: u32) -> bool {
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
    fn image(text: &str) -> Image {
        let (kind, name) = text.split_once(" sm_").unwrap();
        let scope = match name.chars().last() {
            Some('a') => device_scope::EXACT,
            Some('f') => device_scope::FAMILY,
            _ => device_scope::LATER,
        };
        let sm = name.trim_end_matches(['a', 'f']).parse().unwrap();
        Image { kind: kind.into(), sm, scope, bytes: vec![0] }
    }

    /// What a GPU gets of some images.
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
            let images: Vec<Image> = names.iter().map(|n| image(n)).collect();
            let found = choose(&images, *sm).map(|i| describe(i).replace(" for", ""));
            assert_eq!(found.as_deref(), *expected, "sm_{sm} of {names:?}");
        }
    }

    #[test]
    fn an_image_of_an_unknown_scope_is_not_taken() {
        assert!(choose(&[Image { scope: 3, ..image("ptx sm_80") }], 80).is_none());
    }
}
