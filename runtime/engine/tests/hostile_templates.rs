//! Chat templates that were written to end or stall the process: every one ends in an error, or does little,
//! and the process goes on within its memory. And long conversations, which are no attack. Alone in its
//! process, because it measures the memory of the process.

use mlcc_engine::LocalMachine;
use mlcc_text::chat::{TemplateInputs, TemplateValue};
use mlcc_text::{ChatError, ChatMessage, ChatTemplate};
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The end of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RenderEnd {
    /// It renders at most 4 MiB.
    Text,
    Syntax,
    Render,
    Raised,
    Steps,
    Memory,
    Long,
    Slow,
    Deep,
}
use RenderEnd::*;

fn end(template: &str) -> (RenderEnd, String) {
    let rendered = ChatTemplate::from_jinja(template, &LocalMachine).and_then(|template| {
        template.uses_variable("tools");
        template.render(&[ChatMessage::new("user", "hi")], true, &TemplateInputs::default())
    });
    match rendered {
        Ok(text) => {
            assert!(text.len() <= 4 << 20, "{} bytes", text.len());
            (Text, String::new())
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.len() < 8192, "{} bytes of message", text.len());
            let end = match error {
                ChatError::Syntax { .. } => Syntax,
                ChatError::Render { .. } => Render,
                ChatError::Raised { .. } => Raised,
                ChatError::TooManySteps { .. } => Steps,
                ChatError::TooMuchMemory { .. } => Memory,
                ChatError::TooLong { .. } => Long,
                ChatError::TooSlow { .. } => Slow,
                ChatError::TooDeep { .. } => Deep,
                other => panic!("{template}: {other}"),
            };
            (end, text)
        }
    }
}

/// Most memory that this process has had, in KiB.
fn peak() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// Loops that are long enough for anything.
const LOOP: &str = "{% for i in range(99999) %}";

/// A limit that includes the stacks of parsers, and the megabytes of `long_conversations`.
const MOST_KIB: u64 = 256 << 10;

/// One test at a time, since memory is the whole process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn check(cases: &[(&str, &[RenderEnd])]) {
    let _alone = alone();
    let before = peak();
    let mut wrong = String::new();
    for (template, expected) in cases {
        let template = template.replace("LOOP", LOOP).replace("END", "{% endfor %}");
        let (end, error) = end(&template);
        if !expected.contains(&end) {
            let shown: String = template.chars().take(160).collect();
            let _ = writeln!(wrong, "{shown}\n    {end:?} instead of {expected:?}: {error}");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    if let (Some(before), Some(after)) = (before, peak()) {
        assert!(after < MOST_KIB, "{before} to {after} KiB");
    }
}

/// A template that doubles something in every turn of a loop.
const DOUBLE: &str = "{% set ns = namespace(x='xxxxxxxx') %}LOOP{% set ns.x = ";

fn doubled(how: &str) -> String {
    format!("{DOUBLE}{how} %}}END{{{{ ns.x | length }}}}")
}

#[test]
fn texts_that_double() {
    let by_expression = [
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "[ns.x, ns.x] | join",
        "ns.x.join(['', '', ''])",
        "','.join([ns.x, ns.x])",
        "ns.x * 2",
        "2 * ns.x",
        "ns.x | replace('x', 'xx')",
        "ns.x.replace('x', 'xx')",
        "ns.x.replace('', 'x')",
        "ns.x | replace('', 'x')",
        "'%s%s' | format(ns.x, ns.x)",
        "'%s%s' % (ns.x, ns.x)",
        "'%(a)s%(a)s' % {'a': ns.x}",
        "'{}{}'.format(ns.x, ns.x)",
        "'{0}{0}'.format(ns.x)",
        "[ns.x, ns.x] | string",
        "[ns.x, ns.x] | tojson",
        "[ns.x, ns.x] | pprint",
        "{'a': ns.x, 'b': ns.x} | tojson(indent=2)",
        "(ns.x, ns.x) | string",
        "[ns.x, ns.x] ~ ''",
        "[[ns.x, ns.x]] | map('join') | first",
        "(ns.x ~ '\"') | tojson",
        "(ns.x ~ '<') | escape | string ~ ns.x",
        "(ns.x ~ '%') | urlencode",
        "ns.x ~ (ns.x | upper)",
        "ns.x ~ (ns.x | reverse)",
        "ns.x ~ ns.x[::-1]",
        "ns.x ~ ns.x.strip()",
        "[ns.x, ns.x] | map('upper') | join",
        "ns.x + ('%r' % ns.x)",
    ];
    let cases: Vec<String> = by_expression.iter().map(|how| doubled(how)).collect();
    let cases: Vec<(&str, &[RenderEnd])> =
        cases.iter().map(|case| (case.as_str(), &[Memory] as &[RenderEnd])).collect();
    check(&cases);
    check(&[
        (
            "{% set ns = namespace(x='xx') %}LOOP{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}END",
            &[Long],
        ),
        (
            "{% set ns = namespace(x='xx') %}{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}LOOP{% set ns.x = m(ns.x) %}END",
            &[Long],
        ),
        (
            "{% set ns = namespace(x='xx') %}LOOP{% set x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}{% set ns.x = x %}END",
            &[Long],
        ),
        (
            "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% set ns = namespace(x='xx') %}LOOP{% set x %}{% call m() %}{{ ns.x }}{% endcall %}{% endset %}{% set ns.x = x %}END",
            &[Long],
        ),
        ("{% set ns = namespace(l=['x']) %}LOOP{% set ns.l = ns.l + ns.l %}END", &[Memory]),
        ("{% set ns = namespace(l=['x']) %}LOOP{% set ns.l = ns.l * 2 %}END", &[Memory]),
        ("{% set ns = namespace(l=('x',)) %}LOOP{% set ns.l = ns.l + ns.l %}END", &[Memory]),
        ("{% set ns = namespace(l=['x']) %}LOOP{% set ns.l = ns.l | chain(ns.l) | list %}END", &[Memory]),
        ("{% set ns = namespace(s='x') %}LOOP{% set ns.s = ns.s ~ ns.s %}{{ ns.s }}END", &[Memory, Long]),
    ]);
}

#[test]
fn sizes_that_are_huge() {
    check(&[
        ("{{ 'x' * 10**9 }}", &[Memory]),
        ("{{ 10**9 * 'x' }}", &[Memory]),
        ("{{ 'x' * 10**18 }}", &[Memory]),
        ("{{ 'xx' * 99999999 ~ 'xx' * 99999999 }}", &[Memory]),
        ("{% for a in messages %}{{ ('x' * 9999999) ~ ('x' * 9999999) }}{% endfor %}", &[Memory, Long]),
        ("{{ [0] * 10**9 }}", &[Memory]),
        ("{{ ([0] * 10**8) | length }}", &[Memory]),
        ("{{ (0,) * 10**8 }}", &[Memory]),
        ("{{ range(10**9) | list }}", &[Render]),
        (
            "{{ range(99999) | list | map('string') | map('replace', '', 'x' * 1000) | join | length }}",
            &[Memory, Text],
        ),
        ("LOOP{% for j in range(99999) %}{% endfor %}END", &[Steps, Slow]),
        ("{% for a in 'x' * 9999999 %}{% endfor %}", &[Steps, Slow]),
        ("{{ ('x' * 9999999) | list | length }}", &[Memory]),
        ("{{ 'x' | indent(10**9, true) }}", &[Memory]),
        ("{{ 'x\ny' | indent(width=10**10) }}", &[Memory]),
        ("{{ ('\n' * 1000000) | indent(1000000) }}", &[Memory]),
        ("{{ [[1]] | tojson(indent=10**10) }}", &[Memory]),
        ("{{ [[1]] | tojson(indent=100000) | length }}", &[Text]),
        ("{{ '%1000000000d' % 1 }}", &[Render]),
        ("{{ '%.1000000000f' % 1.5 }}", &[Render]),
        ("{{ '%*d' % (1000000000, 1) }}", &[Render]),
        ("{{ '%1000000000d' | format(1) }}", &[Render]),
        ("{{ '%-999999999s' | format('x') }}", &[Render]),
        ("{{ '{:>1000000000}'.format(1) }}", &[Render]),
        ("{{ '{:.1000000000f}'.format(1.5) }}", &[Render]),
        ("{{ '{:{}}'.format(1, 1000000000) }}", &[Render]),
        ("{{ 'x'.center(10**10) }}", &[Render]),
        ("{{ 'x'.ljust(10**10) }}{{ 'x'.zfill(10**10) }}", &[Render]),
        ("{{ 'x' | center(10**10) }}", &[Render]),
        ("{{ [1] | batch(10**9, 0) | list }}", &[Memory]),
        ("{{ [1] | slice(10**9) | list }}", &[Memory]),
        ("{{ [1] | batch(2**62) | list | length }}", &[Memory]),
        ("{{ (range(99999) | join(',' * 10000)) | length }}", &[Memory]),
        ("{{ ('x' * 1000000) | join('x' * 1000000) | length }}", &[Memory]),
        ("{{ ('x' * 1000000) | replace('x', 'y' * 1000000) | length }}", &[Memory]),
        ("{{ (',' * 9999999).split(',') | length }}", &[Memory]),
        ("{{ ('\n' * 9999999).splitlines() | length }}", &[Memory]),
        ("{{ range(99999) | map('string') | sum(start='') }}", &[Render]),
        ("{{ 2 ** 100000 }}{{ 10 ** 10 ** 10 }}", &[Render]),
        ("{{ strftime_now('%A' * 9999999) | length }}", &[Memory]),
        ("{{ raise_exception('x' * 9999999) }}LOOPEND", &[Raised]),
        ("{{ ('x' * 9999999).nothing }}{{ ('x' * 9999999) + 1 }}", &[Render, Memory]),
        ("{{ lipsum(n=10**9) }}", &[Render]),
        ("{{ 'abc'[::-9223372036854775807 - 1] }}{{ 'abc'[1:2:-1] }}{{ [1, 2][9:-9:-1] }}", &[Text]),
        ("{{ 'abc'[10**18:] }}{{ 'abc'[:-(10**18)] }}{{ 'abc'[0:3:10**18] }}", &[Text]),
        ("{{ 'abc'[10**30:] }}", &[Render]),
    ]);
}

#[test]
fn values_that_are_deep_or_contain_themselves() {
    check(&[
        ("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}", &[Render]),
        ("{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns == ns.me }}", &[Render]),
        ("{% set ns = namespace() %}{% set ns.me = {'a': ns} %}{{ ns | tojson }}", &[Render]),
        ("{% set ns = namespace() %}{% set ns.me = {ns: 1} %}{{ ns | pprint }}", &[Render]),
        ("{% set ns = namespace() %}{% set ns.me = dict(a=ns) %}{{ ns | string }}", &[Render]),
        ("{% set ns = namespace() %}{% set ns.me = (ns, 1) %}{{ {ns: 1} }}", &[Render]),
        ("{% set a = namespace() %}{% set b = namespace(a=a) %}{% set a.b = b %}{{ a }}", &[Render]),
        ("{% set ns = namespace() %}{% set ns.a, ns.b = ns, 1 %}{{ ns }}", &[Render]),
        ("{% set ns = namespace() %}{% with ns.a = ns %}{{ ns }}{% endwith %}", &[Render, Syntax]),
        ("{% set ns = namespace() %}{% for x in [1] %}{% set ns.l = loop %}{% endfor %}{{ ns }}", &[Render]),
        ("{% for x in range(9) %}{{ loop.changed(loop) }}{% endfor %}", &[Render]),
        ("{% for x in range(9) %}{{ loop.changed(*[loop]) }}{% endfor %}", &[Syntax]),
        ("{% set ns = namespace(x=[]) %}LOOP{% set ns.x = [ns.x] %}END", &[Deep]),
        ("{% set ns = namespace(x=[]) %}LOOP{% set ns.x = (ns.x,) %}END{{ ns.x }}", &[Deep]),
        ("{% set ns = namespace(x={}) %}LOOP{% set ns.x = {'a': ns.x} %}END{{ ns.x | tojson }}", &[Deep]),
        ("{% set ns = namespace(x={}) %}LOOP{% set ns.x = dict(a=ns.x) %}END{{ ns.x == ns.x }}", &[Deep]),
        ("{% set ns = namespace(x=[1]) %}LOOP{% set ns.x = ns.x | batch(1) | list %}END", &[Deep]),
        ("{% set ns = namespace(x=[1]) %}LOOP{% set ns.x = [ns.x] | list %}END", &[Deep]),
        ("{% set ns = namespace(x=[1]) %}LOOP{% set ns.x = [ns.x] * 2 %}END", &[Memory, Deep]),
        ("{% set ns = namespace(x=[1]) %}LOOP{% set ns.x = ns.x | zip(ns.x) | list %}END", &[Memory, Deep]),
        ("{% set ns = namespace(x={'a': 1}) %}LOOP{% set ns.x = {'a': ns.x | items | list} %}END", &[Deep]),
        ("{% set ns = namespace(x=[1]) %}LOOP{% set ns.x = [ns.x, ns.x] %}END{{ ns.x }}", &[Memory]),
        ("{% set ns = namespace(x=[1]) %}LOOP{% set ns.x = {'a': ns.x, 'b': ns.x} %}END", &[Memory]),
        ("{% set ns = namespace(x=(1,)) %}LOOP{% set ns.x = (ns.x, ns.x) %}END", &[Memory]),
        (
            "{% set ns = namespace(x=[1]) %}{% for i in range(17) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}LOOP{{ ns.x == [ns.x] }}{{ ns.x in [ns.x] }}END",
            &[Slow, Long, Memory],
        ),
        (
            "{% set ns = namespace(x=[1]) %}{% for i in range(17) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}LOOP{% if {ns.x: 1}[ns.x] %}{% endif %}END",
            &[Slow, Memory],
        ),
        (
            "{% set ns = namespace(x=[1]) %}{% for i in range(17) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}LOOP{{ ns.x | tojson }}END",
            &[Memory, Slow],
        ),
        (
            "{% set a = namespace(x=[1], y=[1]) %}{% for i in range(16) %}{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}\
          {% set m = {'a': a.x, 'b': a.x} %}{% set n = {'a': a.y, 'b': a.y} %}{% set x = namespace(**m) %}{% set y = namespace(**n) %}\
          LOOP{% if x == y %}{% endif %}END",
            &[Slow, Memory],
        ),
        (
            "{% set a = namespace(x=(1,), y=(1,)) %}{% for i in range(14) %}{% set a.x = (a.x, a.x) %}{% set a.y = (a.y, a.y) %}{% endfor %}\
          LOOP{% if a.x == a.y %}{% endif %}END",
            &[Slow, Memory],
        ),
        (
            "{% set l = [[1]] * 99999 %}LOOP{{ l in [l, l] }}{{ l | sort | first }}{{ l | unique | length }}END",
            &[Slow, Memory],
        ),
    ]);
}

#[test]
fn recursion_and_loops() {
    let with = "{% with %}".repeat(100)
        + "LOOP{% for j in range(99999) %}{{ undefined_name }}END{% endfor %}"
        + &"{% endwith %}".repeat(100);
    check(&[
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", &[Render]),
        ("{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}", &[Render]),
        (
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
            &[Steps, Slow],
        ),
        (
            "{% macro m(n) %}xx{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(30) }}",
            &[Steps, Slow, Long],
        ),
        (
            "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{% call m() %}x{% endcall %}",
            &[Render],
        ),
        ("{% for x in [[1]] recursive %}{{ loop([[x]]) }}{% endfor %}", &[Render, Deep]),
        ("{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}", &[Render, Steps]),
        ("{% for x in range(99999) recursive %}{% set y = loop(range(99999)) %}{% endfor %}", &[Render]),
        ("{% set m = dict(a=1) %}{% for k in m recursive %}{{ loop(m) }}{% endfor %}", &[Render]),
        ("{% block b %}{{ self.b() }}{% endblock %}", &[Render]),
        ("{% block b %}{{ super() }}{% endblock %}", &[Render]),
        ("{% include 'default' %}", &[Syntax]),
        ("{% extends 'default' %}", &[Syntax]),
        ("{% import 'default' as d %}{{ d }}", &[Syntax]),
        ("{% from 'default' import d %}{{ d }}", &[Syntax]),
        ("LOOP{% for j in range(99999) %}{% macro m() %}{{ i }}{% endmacro %}{% endfor %}END", &[Memory]),
        ("LOOP{% call x() %}{% endcall %}END", &[Render]),
        (
            "{% macro m() %}{{ caller }}{% endmacro %}LOOP{% for j in range(99999) %}{% call m() %}{{ i }}{% endcall %}{% endfor %}END",
            &[Memory],
        ),
        ("{% macro m(n) %}{% if n %}{{ m(*range(999)) }}{% endif %}{% endmacro %}{{ m(1) }}", &[Render]),
        ("{{ range(*range(99999)) }}", &[Render]),
        ("{{ dict(**{'a': 1}) }}{{ namespace(**dict(a=1)) }}", &[Text]),
        (&with, &[Slow, Steps]),
        ("{% for i in range(99999) if (range(99999) | list | length) %}{% endfor %}", &[Steps, Slow, Memory]),
        ("{% set s = 'x' * 9999999 %}LOOP{% if s == s ~ '' %}{% endif %}END", &[Slow, Memory]),
        ("{% set s = 'x' * 9999999 %}LOOP{% if 'y' in s %}{% endif %}END", &[Slow]),
        ("{% set s = 'x' * 9999999 %}LOOP{% if s is in(s) %}{% endif %}END", &[Slow]),
        ("{% set s = 'x' * 9999999 %}LOOP{{ s[-1] }}END", &[Slow]),
        ("{% set s = 'x' * 9999999 %}LOOP{{ s | length }}END", &[Slow]),
        ("{% set s = 'x' * 9999999 %}LOOP{{ s.find('y') }}{{ s.count('xx') }}END", &[Slow]),
        ("{% set s = 'x' * 9999999 %}{{ range(99999) | select('in', s) | list }}", &[Slow, Render]),
        ("{% set s = 'x' * 9999999 %}{{ s.strip(s) }}", &[Render]),
        ("{% set s = 'x' * 9999999 %}{{ s | trim(s) }}", &[Render]),
        ("{{ range(99999) | map(attribute='a.' * 99999) | list }}", &[Render]),
        ("{{ range(99999) | sort(attribute='a.' * 99999) }}", &[Render]),
        ("{{ ['x'] | map('[]') | list }}{{ ['x'] | map('[:]', 1) | list }}", &[Render]),
    ]);
}

#[test]
fn syntax_that_is_deep() {
    let _alone = alone();
    let chain = |begin: &str, link: &str, end: &str, bytes: usize| {
        format!("{begin}{}{end}", link.repeat((bytes - begin.len() - end.len()) / link.len()))
    };
    let bytes = (128 << 10) - 64;
    let cases = [
        chain("{{ 1", "+1", " }}", bytes),
        chain("{{ a", "-1", " }}", bytes),
        chain("{{ 'a'", "~a", " }}", bytes),
        chain("{{ ", "not ", "1 }}", bytes),
        chain("{{ ", "-", "1 }}", bytes),
        chain("{{ a", ".b", " }}", bytes),
        chain("{{ a", "|e", " }}", bytes),
        chain("{{ a", "[0]", " }}", bytes),
        chain("{{ a", "()", " }}", bytes),
        chain("{{ 1", "<1", " }}", bytes),
        chain("{{ 1", " and 1", " }}", bytes),
        chain("{{ 1", " if 1 else 1", " }}", bytes),
        chain("{{ ", "(", "1 }}", bytes),
        chain("{{ ", "[", "1 }}", bytes),
        chain("{{ ", "{1:", "1 }}", bytes),
        chain("", "{% if a %}", "", bytes),
        chain("", "{% for a in b %}", "", bytes),
        chain("{% if a %}", "{% elif a %}", "{% endif %}", bytes),
        chain("{{ 'x' * 9999999", " ~ 'x' * 9999999", " }}", 8000),
    ];
    for case in &cases {
        let (end, error) = end(case);
        let shown = &case[..40];
        assert!(matches!(end, Syntax | Render | Text | Memory | Long | Deep), "{shown}: {end:?} {error}");
    }
}

/// Values that the program gives are bounded too.
#[test]
fn inputs_that_are_deep() {
    let mut deep = TemplateValue::from(1);
    for _ in 0..500 {
        deep = TemplateValue::from(vec![deep]);
    }
    let extra = TemplateInputs { tools: Some(deep), ..TemplateInputs::default() };
    let template = ChatTemplate::from_jinja("{{ tools }}", &LocalMachine).unwrap();
    let error = template.render(&[], true, &extra).unwrap_err();
    assert!(matches!(error, ChatError::TooDeep { .. }), "{error}");
    // The depth that JSON may have.
    let json = "[".repeat(120) + &"]".repeat(120);
    let extra =
        TemplateInputs { tools: Some(serde_json::from_str(&json).unwrap()), ..TemplateInputs::default() };
    assert_eq!(template.render(&[], true, &extra).unwrap(), json);
}

/// A conversation of any length that fits a context is rendered, by templates that copy and collect.
#[test]
fn long_conversations() {
    let _alone = alone();
    let template = ChatTemplate::from_jinja(
        "{% set ns = namespace(all='', list=[]) %}\
         {% for message in messages %}\
         {% set content = message.content | trim %}\
         {% if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}\
         {% set ns.all = ns.all ~ content %}{% set ns.list = ns.list + [message] %}\
         {{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}\
         {% if tools %}{{ message | tojson | length }}{% endif %}\
         {% endfor %}{{ ns.all | length }} {{ ns.list | length }}",
        &LocalMachine,
    )
    .unwrap();
    let text = |bytes: usize| "A sentence, and another. ".repeat(bytes / 25);
    for (count, bytes) in [(1000, 1000), (3000, 100), (1, 1 << 20), (4, 1 << 20), (2, 100)] {
        let messages: Vec<ChatMessage> = (0..count).map(|_| ChatMessage::new("user", text(bytes))).collect();
        let extra = TemplateInputs { tools: Some(TemplateValue::from(vec![1])), ..TemplateInputs::default() };
        let rendered = template.render(&messages, true, &extra).unwrap();
        assert!(rendered.len() > count * (bytes / 25) * 24, "{count} of {bytes}");
        assert!(rendered.ends_with(&format!(" {count}")));
    }
}

/// Renderings at the same time do not count for each other.
#[test]
fn threads_have_their_own_limits() {
    let _alone = alone();
    let template = ChatTemplate::from_jinja("{{ 'x' * 9000000 }}", &LocalMachine).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..4 {
                    assert_eq!(
                        template.render(&[], true, &TemplateInputs::default()).unwrap().len(),
                        9_000_000
                    );
                }
            });
        }
    });
}

/// Python's templates with `%` and `urlencode`.
#[test]
fn formats_of_python() {
    let render = |text: &str| {
        let template = ChatTemplate::from_jinja(text, &LocalMachine).unwrap();
        template.render(&[ChatMessage::new("user", "it's")], true, &TemplateInputs::default())
    };
    // Results of jinja2 3.1.
    for (template, expected) in [
        ("{{ '%s is %d' % ('a', 3) }}", "a is 3"),
        ("{{ '%s' % 'b' }}", "b"),
        ("{{ '%d%%' % 50 }}", "50%"),
        ("{{ '%r %s' % ('x', 1) }}", "'x' 1"),
        ("{{ '%s %r' % (1, messages[0].content) }}", "1 \"it's\""),
        ("{{ '%i|%5d|%-5s|%05.1f' % (7, 42, 'ab', 2.25) }}", "7|   42|ab   |002.2"),
        ("{{ '%(a)s-%(b)s' % {'a': 1, 'b': 'z'} }}", "1-z"),
        ("{{ 7 % 3 }}{{ -7 % 3 }}{{ 7.5 % 2 }}", "121.5"),
        ("{{ 'a b/c?d' | urlencode }}", "a%20b/c%3Fd"),
        (
            "{% for g in [{'a': 1, 'b': 2}, {'a': 1, 'b': 3}] | groupby('a') %}{{ g.grouper }}:{{ g.list | length }}{% endfor %}",
            "1:2",
        ),
        (
            "{% for k, v in {'x': 1, 'y': [2]} | dictsort %}{{ k }}{{ v }}{% endfor %}{{ {'b': 1} | items | list }}",
            "x1y[2][('b', 1)]",
        ),
        (
            "{{ [1, 2, 3] | sum }}{{ [{'a': 1}, {'a': 4}] | sum(attribute='a') }}{{ 'a' in 'abc' }}{{ 3 not in [1, 2] }}",
            "65TrueTrue",
        ),
        ("{{ [1, 2, 3][::-1] }}{{ 'abcdef'[4:1:-2] }}{{ (1, 2, 3)[1:] }}", "[3, 2, 1]ec(2, 3)"),
    ] {
        assert_eq!(render(template).unwrap(), expected, "{template}");
    }
    assert!(render("{{ '%s %s' % 'a' }}").is_err());
}
