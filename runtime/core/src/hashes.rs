//! Reads the section `.mlcc.hashes`, which the compiler writes:
//!
//! ```text
//! mlcc-hashes 1 xxh3-128
//! code <hash>
//! section <name> <bytes> <hash>
//! external <name> <bytes> <hash> <offset> <file name>
//! made <name> <bytes> <hash>
//! self <hash of the lines above>
//! ```

use xxhash_rust::xxh3::xxh3_128;

/// One payload section as the compiler wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionRecord {
    pub name: String,
    pub bytes: u64,
    pub hash: u128,
    pub location: SectionLocation,
}

/// The place of a section.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SectionLocation {
    Inside,
    /// In another file, at this offset.
    External {
        offset: u64,
        file: String,
    },
    /// Nowhere: it is made when the model is loaded.
    Made,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionHashes {
    pub code: u128,
    pub sections: Vec<SectionRecord>,
}

impl SectionHashes {
    /// Parses and checks the section against its own last line.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|_| "its hash section is not text".to_string())?;
        let damaged = || "its hash section is damaged".to_string();
        let body = text.trim_end().rfind('\n').map(|at| &text[..=at]).ok_or_else(damaged)?;
        let own = text[body.len()..].trim_end().strip_prefix("self ").and_then(hex).ok_or_else(damaged)?;
        if own != xxh3_128(body.as_bytes()) {
            return Err(damaged());
        }
        let mut lines = body.lines();
        match lines.next() {
            Some("mlcc-hashes 1 xxh3-128") => {}
            other => return Err(format!("its hash section starts with `{}`", other.unwrap_or_default())),
        }
        let code = lines.next().and_then(|l| l.strip_prefix("code ")).and_then(hex).ok_or_else(damaged)?;
        let entries =
            lines.map(|l| parse_record(l).ok_or_else(|| format!("unknown line in its hash section: `{l}`")));
        Ok(Self { code, sections: entries.collect::<Result<_, _>>()? })
    }

    pub fn find_section(&self, name: &str) -> Option<&SectionRecord> {
        self.sections.iter().find(|e| e.name == name)
    }
}

fn hex(digits: &str) -> Option<u128> {
    (digits.len() == 32).then(|| u128::from_str_radix(digits, 16).ok()).flatten()
}

fn parse_record(line: &str) -> Option<SectionRecord> {
    let (kind, rest) = line.split_once(' ')?;
    let mut fields = rest.splitn(5, ' ');
    let (name, bytes, hash) =
        (fields.next()?.to_string(), fields.next()?.parse().ok()?, hex(fields.next()?)?);
    let place = match kind {
        "section" => SectionLocation::Inside,
        "external" => SectionLocation::External {
            offset: fields.next()?.parse().ok()?,
            file: fields.next()?.to_string(),
        },
        "made" => SectionLocation::Made,
        _ => return None,
    };
    fields.next().is_none().then_some(SectionRecord { name, bytes, hash, location: place })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(body: &str) -> String {
        format!("{body}self {:032x}\n", xxh3_128(body.as_bytes()))
    }

    #[test]
    fn reads_what_the_compiler_writes() {
        let h = "0".repeat(31) + "7";
        let body = format!(
            "mlcc-hashes 1 xxh3-128\ncode {h}\nsection .mlcc.chat 3 {h}\nexternal .mlcc.weights 9 {h} 4096 a b.st\n"
        );
        let hashes = SectionHashes::parse(sealed(&body).as_bytes()).unwrap();
        assert_eq!(hashes.code, 7);
        assert_eq!(hashes.find_section(".mlcc.chat").unwrap().bytes, 3);
        let beside = SectionLocation::External { offset: 4096, file: "a b.st".into() };
        assert_eq!(hashes.find_section(".mlcc.weights").unwrap().location, beside);
        let body = format!("mlcc-hashes 1 xxh3-128\ncode {h}\nmade .mlcc.weights 9 {h}\n");
        let hashes = SectionHashes::parse(sealed(&body).as_bytes()).unwrap();
        assert_eq!(hashes.find_section(".mlcc.weights").unwrap().location, SectionLocation::Made);
    }

    #[test]
    fn damage_is_found() {
        let body = format!("mlcc-hashes 1 xxh3-128\ncode {:032x}\n", 5);
        let good = sealed(&body);
        assert!(SectionHashes::parse(good.as_bytes()).is_ok());
        for i in 0..good.trim_end().len() {
            let mut bad = good.clone().into_bytes();
            bad[i] ^= 1;
            assert!(SectionHashes::parse(&bad).is_err(), "flipped byte {i}");
        }
        for n in 0..good.len() - 1 {
            assert!(SectionHashes::parse(&good.as_bytes()[..n]).is_err(), "cut at {n}");
        }
        for bad in
            ["what 1\n", "section a\n", "section a 1 2\n", "external a 1 00000000000000000000000000000000\n"]
        {
            assert!(SectionHashes::parse(sealed(&format!("{body}{bad}")).as_bytes()).is_err(), "{bad}");
        }
    }
}
