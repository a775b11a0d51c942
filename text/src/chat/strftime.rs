//! `datetime.strftime` for the formats that chat templates use. English names.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `seconds` since 1970-01-01 as `format` says. An unknown directive stays as it is.
pub fn strftime(format: &str, seconds: u64) -> String {
    let (days, second) = ((seconds / 86_400) as i64, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let weekday = DAYS[(days + 4).rem_euclid(7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let of_year = days - days_before(year) + 1;
    let hour12 = (hour + 11) % 12 + 1;
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // glibc's flag for numbers without padding.
        let bare = directive == Some('-');
        if bare {
            directive = chars.next();
        }
        let two = |number: u64| if bare { number.to_string() } else { format!("{number:02}") };
        match directive {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&two(year.rem_euclid(100) as u64)),
            Some('m') => out.push_str(&two(month)),
            Some('d') => out.push_str(&two(day)),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('H') => out.push_str(&two(hour)),
            Some('I') => out.push_str(&two(hour12)),
            Some('M') => out.push_str(&two(minute)),
            Some('S') => out.push_str(&two(second)),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('j') if bare => out.push_str(&of_year.to_string()),
            Some('j') => out.push_str(&format!("{of_year:03}")),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(weekday),
            Some('a') => out.push_str(&weekday[..3]),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('T') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('Z') => {}
            Some('%') => out.push('%'),
            Some(other) => {
                out.push('%');
                out.push(other);
            }
            None => out.push('%'),
        }
    }
    out
}

/// Year, month and day of a day number since 1970-01-01, in the Gregorian calendar (algorithm of H. Hinnant,
/// "chrono-compatible low-level date algorithms").
fn civil(days: i64) -> (i64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    (year, month as u64, day as u64)
}

/// Days from 1970-01-01 to the first of January of `year`.
fn days_before(year: i64) -> i64 {
    let before = year - 1;
    365 * (year - 1970) + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400) - 477
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_as_python_formats_them() {
        // datetime.fromtimestamp(s, timezone.utc).strftime(...)
        let cases = [
            (0, "%Y-%m-%d %H:%M:%S %A", "1970-01-01 00:00:00 Thursday"),
            (1_709_210_096, "%d %b %Y", "29 Feb 2024"),
            (1_709_210_096, "%B %-d, %y %j %I:%M %p %a %%", "February 29, 24 060 12:34 PM Thu %"),
            (1_735_689_599, "%F %T %j", "2024-12-31 23:59:59 366"),
            (4_102_444_800, "%A, %d.%m.%Y", "Friday, 01.01.2100"),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(strftime(format, seconds), expected, "{format}");
        }
        assert_eq!(strftime("%Q %", 0), "%Q %");
    }
}
