//! Names near a mistyped one, for messages about a name that is not known.

use std::fmt::Write;

/// Names that a message offers.
const OFFERED: usize = 3;

/// Characters of the longest name that is compared; what is longer is no mistyped name.
const LONGEST: usize = 100;

/// The known names that are nearest to `name`, at most three, the nearest first. A name that has little in
/// common with `name` is not among them.
pub fn nearest_names<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> Vec<&'k str> {
    let wanted = characters(name);
    if wanted.is_empty() || wanted.len() > LONGEST {
        return Vec::new();
    }
    let mut near: Vec<(usize, &str)> =
        known.into_iter().filter_map(|known| Some((distance_if_near(&wanted, known)?, known))).collect();
    // Equally near names stay in their order.
    near.sort_by_key(|(distance, _)| *distance);
    near.dedup_by_key(|(_, known)| *known);
    near.into_iter().map(|(_, known)| known).take(OFFERED).collect()
}

/// The three known names with the fewest edits from `name`, those that are near first, however far the others
/// are.
pub fn closest_names<'k>(name: &str, known: impl IntoIterator<Item = &'k str> + Clone) -> Vec<&'k str> {
    let mut found = nearest_names(name, known.clone());
    let wanted: Vec<char> = characters(name);
    let mut others: Vec<(usize, &str)> =
        known.into_iter().map(|known| (edit_distance(&wanted, &characters(known)), known)).collect();
    others.sort_by_key(|(distance, _)| *distance);
    for (_, other) in others {
        if found.len() < OFFERED && !found.contains(&other) {
            found.push(other);
        }
    }
    found
}

/// The question "did you mean `a`, `b` or `c`? " with the [`nearest_names`] names; nothing where no name is
/// near. What follows it says where all names are listed.
pub fn did_you_mean<'k>(name: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    question(&nearest_names(name, known))
}

/// The same question with the [`closest_names`], for short lists of names.
pub fn did_you_mean_one_of<'k>(name: &str, known: impl IntoIterator<Item = &'k str> + Clone) -> String {
    question(&closest_names(name, known))
}

fn question(near: &[&str]) -> String {
    let mut question = String::new();
    for (at, known) in near.iter().enumerate() {
        let between = match at {
            0 => "did you mean ",
            _ if at + 1 == near.len() => " or ",
            _ => ", ",
        };
        // Writing into a string cannot fail.
        let _ = write!(question, "{between}`{known}`");
    }
    if !question.is_empty() {
        question += "? ";
    }
    question
}

fn characters(name: &str) -> Vec<char> {
    name.trim().chars().flat_map(char::to_lowercase).take(LONGEST + 1).collect()
}

/// The number of edits to `known`, if they are at most a third of the longer name, or one name is a part of
/// the other.
fn distance_if_near(wanted: &[char], known: &str) -> Option<usize> {
    let known = characters(known);
    let (short, long) = if wanted.len() < known.len() { (wanted, &known[..]) } else { (&known[..], wanted) };
    if short.is_empty() || long.len() > LONGEST {
        return None;
    }
    let contained = short.len() > 2 && long.windows(short.len()).any(|part| part == short);
    let distance = edit_distance(wanted, &known);
    (contained || distance <= (long.len() / 3).max(1)).then_some(distance)
}

/// Insertions, deletions, replacements and exchanges of neighbours that make one name of the other (the
/// optimal string alignment distance).
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, to) in b.iter().enumerate() {
            let replaced = last[j] + usize::from(from != to);
            let mut least = replaced.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *from == b[j - 1] && a[i - 1] == *to {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRESETS: [&str; 8] = [
        "rwkv-3b",
        "llama-3-8b",
        "llama-3.1-8b",
        "qwen3-0.6b",
        "qwen3-1.7b",
        "qwen3-30b-a3b",
        "qwen2.5-0.5b",
        "gpt2",
    ];

    #[test]
    fn edits_are_counted() {
        let count = |a: &str, b: &str| edit_distance(&characters(a), &characters(b));
        assert_eq!([count("", ""), count("abc", ""), count("", "ab")], [0, 3, 2]);
        assert_eq!([count("sm90", "sm_90"), count("fues", "fuse"), count("fusee", "fuse")], [1, 1, 1]);
        assert_eq!(count("kitten", "sitting"), 3);
    }

    #[test]
    fn the_nearest_come_first_and_are_few() {
        assert_eq!(nearest_names("llama3-8b", PRESETS), ["llama-3-8b", "llama-3.1-8b"]);
        // A part of names: the shortest first, those before others as they were listed.
        assert_eq!(nearest_names("Qwen3", PRESETS), ["qwen3-0.6b", "qwen3-1.7b", "qwen3-30b-a3b"]);
        assert_eq!(nearest_names("gpt-2", PRESETS), ["gpt2"]);
        assert_eq!(nearest_names("mistral", PRESETS), [""; 0]);
        assert_eq!(nearest_names("", PRESETS), [""; 0]);
        assert_eq!(nearest_names(&"llama-3-8b".repeat(1 << 20), PRESETS), [""; 0]);
    }

    #[test]
    fn three_are_closest_however_far() {
        let closest = closest_names("gpt-2", PRESETS);
        assert_eq!((closest[0], closest.len()), ("gpt2", 3));
        assert_eq!(closest_names("mistral", PRESETS).len(), 3);
        assert_eq!(closest_names("x", ["a", "b"]), ["a", "b"]);
    }

    #[test]
    fn questions_name_one_two_or_three() {
        assert_eq!(did_you_mean("gpt-2", PRESETS), "did you mean `gpt2`? ");
        assert_eq!(did_you_mean("llama3-8b", PRESETS), "did you mean `llama-3-8b` or `llama-3.1-8b`? ");
        let three = "did you mean `qwen3-0.6b`, `qwen3-1.7b` or `qwen3-30b-a3b`? ";
        assert_eq!(did_you_mean("qwen3", PRESETS), three);
        assert_eq!(did_you_mean("mistral", PRESETS), "");
    }
}
