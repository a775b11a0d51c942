//! Settings that `/set` changes.

use mlcc_engine::SamplingParams;

use crate::commands::run::SeedArg;

/// The settings of answers from now on.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatSettings {
    pub sampling: SamplingParams,
    /// `None` = no limit, -1 for people.
    pub max_tokens: Option<usize>,
    pub stop: Vec<String>,
}

const KEYS: &str = "temperature, top_k, top_p, min_p, repeat_penalty, repeat_last_n, presence_penalty, \
                    frequency_penalty, seed, max_tokens, stop";

impl ChatSettings {
    pub fn check(&self) -> Result<(), String> {
        self.sampling.check().map_err(|e| e.to_string())
    }

    /// `key=value`, several with `;`. All or nothing; says what is set now.
    pub fn set(&mut self, text: &str) -> Result<String, String> {
        let mut new = self.clone();
        let mut said = Vec::new();
        for pair in text.split(';').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("`{pair}` is not a setting: write for example top_k=20"))?;
            let key = key.trim().replace('-', "_");
            new.set_one(&key, value.trim())?;
            said.push(format!("{key} = {}", new.get(&key)));
        }
        new.check()?;
        *self = new;
        Ok(said.join(", "))
    }

    fn set_one(&mut self, key: &str, value: &str) -> Result<(), String> {
        let s = &mut self.sampling;
        match key {
            "temperature" | "temp" => s.temperature = number(key, value)?,
            "top_k" => s.top_k = number(key, value)?,
            "top_p" => s.top_p = number(key, value)?,
            "min_p" => s.min_p = number(key, value)?,
            "repeat_penalty" | "repetition_penalty" => s.repeat_penalty = number(key, value)?,
            "repeat_last_n" => s.repeat_last_n = number(key, value)?,
            "presence_penalty" => s.presence_penalty = number(key, value)?,
            "frequency_penalty" => s.frequency_penalty = number(key, value)?,
            "seed" => s.seed = SeedArg::parse(value)?.0,
            "max_tokens" | "predict" => match number::<i64>(key, value)? {
                -1 => self.max_tokens = None,
                n => {
                    let n = usize::try_from(n);
                    self.max_tokens =
                        Some(n.map_err(|_| format!("{key} is {value}, expected -1 (no limit) or more"))?);
                }
            },
            "stop" => self.stop = value.split(',').filter(|s| !s.is_empty()).map(String::from).collect(),
            _ => return Err(format!("there is no setting `{key}`; settings are {KEYS}")),
        }
        Ok(())
    }

    fn get(&self, key: &str) -> String {
        let s = &self.sampling;
        match key {
            "temperature" | "temp" => s.temperature.to_string(),
            "top_k" => s.top_k.to_string(),
            "top_p" => s.top_p.to_string(),
            "min_p" => s.min_p.to_string(),
            "repeat_penalty" | "repetition_penalty" => s.repeat_penalty.to_string(),
            "repeat_last_n" => s.repeat_last_n.to_string(),
            "presence_penalty" => s.presence_penalty.to_string(),
            "frequency_penalty" => s.frequency_penalty.to_string(),
            "seed" => s.seed.map_or("-1 (another one each time)".into(), |seed| seed.to_string()),
            "max_tokens" | "predict" => self.max_tokens.map_or("-1 (no limit)".into(), |n| n.to_string()),
            "stop" => self.stop.join(","),
            _ => String::new(),
        }
    }

    /// One line per setting.
    pub fn list(&self) -> String {
        KEYS.split(", ").map(|key| format!("{key} = {}\n", self.get(key))).collect()
    }
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{key}: `{value}` is not a number that fits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> ChatSettings {
        ChatSettings { sampling: SamplingParams::default(), max_tokens: None, stop: vec![] }
    }

    #[test]
    fn several_at_once() {
        let mut s = settings();
        let said = s.set("temperature=0.5; top-p=0.8;seed=23;max_tokens=100;stop=a,b").unwrap();
        assert_eq!(said, "temperature = 0.5, top_p = 0.8, seed = 23, max_tokens = 100, stop = a,b");
        assert_eq!((s.sampling.temperature, s.sampling.top_p, s.sampling.seed), (0.5, 0.8, Some(23)));
        assert_eq!((s.max_tokens, s.stop.len()), (Some(100), 2));
        s.set("seed=-1;max_tokens=-1;stop=").unwrap();
        assert_eq!((s.sampling.seed, s.max_tokens, s.stop.len()), (None, None, 0));
        assert_eq!(s.list().lines().count(), 11);
        assert!(s.list().contains("top_k = 40\n"));
    }

    #[test]
    fn a_mistake_changes_nothing() {
        for (wrong, part) in [
            ("top_k", "not a setting"),
            ("top_k=many", "top_k: `many`"),
            ("top_k=3;colour=red", "`colour`; settings are temperature"),
            ("seed=1;top_p=7", "top_p"),
            ("temperature=nan", "temperature"),
        ] {
            let mut s = settings();
            let error = s.set(wrong).unwrap_err();
            assert!(error.contains(part), "{wrong}: {error}");
            assert_eq!(s, settings());
        }
    }
}
