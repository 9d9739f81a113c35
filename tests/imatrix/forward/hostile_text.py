"""A text that shows how a tokenizer cuts: 24 scripts, and what lies between words in all its kinds."""

from __future__ import annotations

HOSTILE: tuple[str, ...] = (
    "Hello, WORLD! I've I'M we'LL he'd it's DON'T 'tis o'clock y'all 'ſ It'S we'reX 1'sx a'vea",
    "CamelCase HTTPServer iPhone eBAY",
    "def f(x):\n    return x**2  # comment\n\n\tif a!=b: pass\r\n\r\n   \n x = {'k': [1, 22, 333, 55555]}\n",
    "1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 0x1F a1b2c3 ½ Ⅷ ٣٤٥ ²³ v2.0-rc1 x12²345y １２３４",
    "Ελληνικά ΚΕΦΑΛΑΊΑ, το τέλος; Наверное, Съешь ЕЩЁ этих французских БуЛок; нещо на Български",
    "עברית שָׁלוֹם עולם. العربية مَرْحَبًا بالعالم، ٢٠٢٤؟ فارسی گفت‌وگو اردو ہے۔",
    "हिन्दी में संयुक्ताक्षर क्ष्म। বাংলা ভাষা ১২৩ ਪੰਜਾਬੀ ਗੁਰਮੁਖੀ ગુજરાતી ଓଡ଼ିଆ தமிழ் மொழி తెలుగు లిపి ಕನ್ನಡ മലയാളം සිංහල",
    "ภาษาไทยไม่เว้นวรรค ๑๒๓ ພາສາລາວ ကမ္ဘာမြန်မာ ភាសាខ្មែរ བོད་ཡིག ქართული ᲥᲐᲠᲗᲣᲚᲘ Հայերեն ԵՐԵՎԱՆ አማርኛ ᏣᎳᎩ ꮳꮃꭹ",
    "我想在apple工作1314151天～ 二〇二五年1月10日!! ",
    "東京タワーは333メートルです。ひらがなカタカナ々〆 𠮷野家 ㍿豈",
    "한국어 텍스트 ㄱㄴㄷ 한글 ㄅㄆㄇ ᠮᠣᠩᠭᠣᠯ ⴰⵎⴰⵣⵉⵖ ߒߞߏ 𐐀𐐨 𝔘𝔫𝔦",
    "Ünïcödé Ǆ ǅ ǆ ﬁ Ａｂｃ İstanbul ıI ß ẞ Tiếng Việt e\u0301E\u0301 n\u0303 \u0301x ѐй a\u0300\u0316b",
    "😶\u200d🌫️ ✅ 🦙🦙 👩🏽\u200d💻 🇩🇪 #️⃣ $€£+<=>~^|` §©®°µ ------======= ''''''```\"\"\"",
    "...!!!??? «» „“ ‘’ — … ¿¡",
    "<|x|> <｜x｜> <sentinel:12> IMGIMGABCZ IMGIMGAZ @user #tag_1 a_b a-b C++ http://a.b/c?d=e&f=%20//",
    " leading", "  two", "   three   inside    here", "trailing ", "trailing  ", "tabs\t\t\ttabs \t x",
    "nbsp\u00a0\u00a0x\u3000y\u2003z\u2028w\u0085v\u200bu\ufeff \u3000。 x  \u3000 \u180e\u1680q",
    "\n", " \n \n\n ", "a\n\nb\r\rc \n\n\n  d\n", "x" * 40 + "   " * 20 + "7" * 20, "",
)  # fmt: skip
"""Lines, of which some hold line ends."""
